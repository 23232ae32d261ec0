"""Adapters that were made elsewhere and are uploaded: received into a new directory, checked, and saved."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline import errors, layout
from paceline.layout import CheckpointPath
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Checkpoint, CheckpointKind
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.import_adapter import ADAPTER_FILES, check_adapter
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.runs.record import RunRecord

_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 16 << 20
"""What a safetensors file may have besides its tensors."""

Parts = AsyncIterator[pb.UploadCheckpointRequest]


class AdapterUploads:
    """Saves what clients upload."""

    def __init__(self, checkpoints: CheckpointStore, guard: DiskGuard, silent_seconds: float) -> None:
        """Give up an upload from which nothing arrives for `silent_seconds`."""
        self._checkpoints = checkpoints
        self._guard = guard
        self._silent_seconds = silent_seconds

    async def save(self, parts: Parts, find_run: Callable[[str], RunRecord]) -> Checkpoint:
        """Receive an adapter and save it as a sampler checkpoint, durably and atomically; return that.

        `find_run` returns the caller's run. Raises what UploadCheckpoint's contract names.
        """
        try:
            return await self._save(parts, find_run)
        except errors.PacelineError:
            await self._discard(parts)
            raise

    async def _save(self, parts: Parts, find_run: Callable[[str], RunRecord]) -> Checkpoint:
        first = await self._next(parts)
        if first is None or first.WhichOneof("part") != "header":
            raise errors.MissingField("send the header first", field="header")
        header = first.header
        run = find_run(header.run_id)
        name = layout.check_name(header.name)
        path = CheckpointPath(run.run_id, CheckpointKind.SAMPLER, name)
        limits = {
            layout.CONFIG_FILE: _MAX_CONFIG_BYTES,
            layout.WEIGHTS_FILE: run.state_bytes(CheckpointKind.SAMPLER) + _MAX_HEADER_BYTES,
        }
        with ExitStack() as reserved:  # until what was written is measured

            def reserve(directory: Path, size: int) -> None:
                self._guard.check_free(directory, size)
                reserved.enter_context(self._guard.reserve(run.tenant, size))

            async def receive(directory: Path) -> None:
                await self._receive(parts, directory, limits, reserve)
                await asyncio.to_thread(check_adapter, directory, run.parameters)

            return await self._checkpoints.save(
                path,
                receive,
                base_model=run.base_model,
                tenant=run.tenant,
                step=0,
                ttl_seconds=header.ttl_seconds if header.HasField("ttl_seconds") else None,
                overwrite=header.overwrite,
            )

    async def _receive(
        self, parts: Parts, directory: Path, limits: dict[str, int], reserve: Callable[[Path, int], None]
    ) -> None:
        """Write the files of an upload; each may have as many bytes as `limits` says.

        `reserve` reserves the bytes of a file, before any is written.
        """
        missing = set(limits)
        while (part := await self._next(parts)) is not None:
            file = part.file
            if part.WhichOneof("part") != "file":
                raise errors.InvalidArgument("send the next file: its name, size and SHA-256", field="file")
            if file.name not in missing:
                accepted = " and ".join(ADAPTER_FILES)
                raise errors.InvalidArgument(f"is {file.name[:100]!r}; send {accepted}, each once", field="file.name")
            if file.size_bytes > limits[file.name]:
                message = f"is {file.size_bytes}; the run's {file.name} has at most {limits[file.name]} bytes"
                raise errors.OutOfRange(message, field="file.size_bytes")
            missing.discard(file.name)
            await asyncio.to_thread(reserve, directory, file.size_bytes)
            await self._receive_file(parts, directory / file.name, file)
        if missing:
            raise errors.MissingField(f"{min(missing)} was not sent; send both files", field="file")

    async def _receive_file(self, parts: Parts, path: Path, file: pb.UploadedFile) -> None:
        digest, left = hashlib.sha256(), file.size_bytes
        with await asyncio.to_thread(path.open, "xb") as output:
            while left:
                part = await self._next(parts)
                if part is None or part.WhichOneof("part") != "data" or not part.data:
                    raise errors.ChecksumMismatch(f"{file.name} ended {left} bytes early; send it again", field="file")
                if len(part.data) > left:
                    message = f"{file.name} has more than the announced {file.size_bytes} bytes; send it again"
                    raise errors.ChecksumMismatch(message, field="file")
                await asyncio.to_thread(output.write, part.data)
                digest.update(part.data)
                left -= len(part.data)
        if digest.hexdigest() != file.sha256:
            raise errors.ChecksumMismatch(
                f"{file.name} has another SHA-256 than announced; send it again", field="file"
            )

    async def _discard(self, parts: Parts) -> None:
        """Read what is still sent, for a while.

        gRPC's Python client loses the status of a call that ends while it is sending, here and in the gateway.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._silent_seconds):
                async for _ in parts:
                    pass

    async def _next(self, parts: Parts) -> pb.UploadCheckpointRequest | None:
        """Return the next part; None at the end."""
        try:
            async with asyncio.timeout(self._silent_seconds):
                return await anext(parts, None)
        except TimeoutError:
            message = f"nothing arrived for {self._silent_seconds:g} s; send the checkpoint again"
            raise errors.ReaderStalled(message) from None
