"""Uploads of adapters that were made elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline import errors, weights
from paceline.client.transport import Transport
from paceline.codec.resources import checkpoint_from_proto
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint
from paceline.weights.adapter_config import BASE_LAYER

_PART_BYTES = 1 << 20


async def upload(transport: Transport, header: pb.UploadHeader, directory: Path) -> Checkpoint:
    """Send the adapter of a directory, without the base model's own weights. Raises CheckpointMismatch for none."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            message = f"{directory} has no {name}; save the adapter with PEFT's save_pretrained, as safetensors"
            raise errors.CheckpointMismatch(message, field="directory")
    with TemporaryDirectory() as scratch:
        own = await asyncio.to_thread(_without_base, directory / WEIGHTS_FILE, Path(scratch))
        files = {CONFIG_FILE: directory / CONFIG_FILE, WEIGHTS_FILE: own}

        def send(request: pb.UploadCheckpointRequest, **given: Any) -> Awaitable[pb.UploadCheckpointResponse]:
            return transport.trainer.UploadCheckpoint(_parts(request, files), **given)

        reply = await transport.call(send, pb.UploadCheckpointRequest(header=header), "training")
    return checkpoint_from_proto(reply.checkpoint)


async def _parts(
    first: pb.UploadCheckpointRequest, files: dict[str, Path]
) -> AsyncIterator[pb.UploadCheckpointRequest]:
    yield first
    for name, path in files.items():
        sha256 = await asyncio.to_thread(weights.sha256_of, path)
        file = pb.UploadedFile(name=name, size_bytes=path.stat().st_size, sha256=sha256)
        yield pb.UploadCheckpointRequest(file=file)
        with await asyncio.to_thread(path.open, "rb") as source:
            while data := await asyncio.to_thread(source.read, _PART_BYTES):
                yield pb.UploadCheckpointRequest(data=data)


def _without_base(file: Path, scratch: Path) -> Path:
    """Return a file of the adapter's own tensors: this one, or a copy in `scratch`."""
    try:
        names = [entry.name for entry in weights.read_tensor_entries(file)]
    except (ValueError, errors.PacelineError) as error:
        raise errors.CheckpointMismatch(f"{file} is no readable adapter: {error}", field="directory") from error
    own = [name for name in names if BASE_LAYER not in name]
    if own == names:
        return file
    weights.copy_tensors(file, scratch / WEIGHTS_FILE, own)
    return scratch / WEIGHTS_FILE
