"""Download a checkpoint from the trainer's volume to a local directory."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from uuid import uuid4

import grpc

from paceline import errors
from paceline.client.retry import explain
from paceline.client.transport import Transport, read
from paceline.layout import MANIFEST_FILE, CheckpointPath
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.weights.manifest import read_manifest, weights_file


async def download(transport: Transport, path: str, directory: Path) -> None:
    """Write a checkpoint's files into a new directory, which appears once all files are complete and verified.

    Raises InvalidPath, CheckpointNotFound, ChecksumMismatch, FileExistsError.
    """
    checkpoint = CheckpointPath.parse(path)
    staging = await asyncio.to_thread(_make_staging, directory)
    try:
        digests = await _receive(transport, pb.DownloadCheckpointRequest(path=str(checkpoint)), staging)
        _verify(staging, digests)
        await asyncio.to_thread(staging.replace, directory)
    finally:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)


def _make_staging(directory: Path) -> Path:
    """Create the staging directory that is later renamed to `directory`. Raises FileExistsError."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} is there already; name a new directory, or an empty one")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}.{uuid4().hex}")
    staging.mkdir()
    return staging


async def _receive(transport: Transport, request: pb.DownloadCheckpointRequest, directory: Path) -> dict[str, str]:
    """Write the files of a stream; return the SHA-256 of each by name."""
    method, seconds = transport.trainer.DownloadCheckpoint, transport.timeouts.training
    call, part = await transport.open_stream(method, request, seconds)
    digests = {}
    try:
        while part is not None:
            name, left, digest = Path(part.file.name).name, part.file.size_bytes, hashlib.sha256()
            with await asyncio.to_thread((directory / name).open, "wb") as file:
                while left and (part := await read(call)) is not None and part.data:
                    await asyncio.to_thread(file.write, part.data)
                    digest.update(part.data)
                    left -= len(part.data)
            if left:
                raise errors.ChecksumMismatch(f"{name} ended {left} bytes early; download it again", field="path")
            digests[name] = digest.hexdigest()
            part = await read(call)
    except grpc.aio.AioRpcError as failure:
        raise explain(failure)[0] from failure
    finally:
        transport.end_stream(call)
    return digests


def _verify(directory: Path, digests: dict[str, str]) -> None:
    """Check the weights against the manifest. Raises ChecksumMismatch."""
    if MANIFEST_FILE not in digests:
        raise errors.ChecksumMismatch("the checkpoint has no manifest; it is damaged", field="path")
    manifest = read_manifest(directory)
    if digests.get(weights_file(manifest)) != manifest.model.sha256:
        raise errors.ChecksumMismatch("the weights differ from the manifest; the checkpoint is damaged", field="path")
