"""The staging directory, where weights that arrive in chunks are assembled: private, and in memory if possible."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from uuid import uuid4

from paceline import errors
from paceline.background import Background
from paceline.files.own_directory import OwnDirectory
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from paceline.weights import ChunkWriter, Piece, crc32c_of, read_tensor_entries, weights_file
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import StagedAdapter

_MOST_WAITING = 1
"""Chunks buffered while the thread writes the previous ones. More block the sender, so memory stays at two chunks."""


class NotLinked(Exception):
    """The trainer's file cannot be linked from this sampler."""

    def __init__(self, *, is_shared: bool) -> None:
        """`is_shared` says whether this sampler nevertheless sees the trainer's staging directory."""
        super().__init__()
        self.is_shared = is_shared


class StagingArea(OwnDirectory):
    """A private directory of this process, removed when it ends or when the next sampler starts."""

    def __init__(self, root: Path) -> None:
        """Remove what crashed samplers left in `root`, and create a new directory there."""
        super().__init__(root, "paceline-sampler")
        self._clearing = Background("staged files not removed")

    def allocate(self, manifest: pb.Manifest) -> Path:
        """Create a directory for weights, with the configuration if they are an adapter's; the caller owns it.

        Return the path of the weights' file in it. Raises DiskFull, and then leaves no directory.
        """
        directory = self.path / uuid4().hex
        try:
            with _staged():
                directory.mkdir(parents=True)
                file = directory / weights_file(manifest)
                if file.name == WEIGHTS_FILE:
                    (directory / CONFIG_FILE).write_bytes(manifest.adapter_config)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return file

    @asynccontextmanager
    async def receive(self, manifest: pb.Manifest) -> AsyncIterator[AdapterReceiver]:
        """Yield a receiver for one adapter or whole model. Unless it finishes, its files are removed afterwards."""
        making = asyncio.ensure_future(asyncio.to_thread(lambda: AdapterReceiver(self.allocate(manifest), manifest)))
        try:
            yield await asyncio.shield(making)
        finally:
            # The caller may be cancelled at any moment, even twice, but the thread creates the files nevertheless. So a
            # separate task removes them.
            await asyncio.shield(self._clearing.spawn(_close(making)))


class AdapterReceiver:
    """Assembles one adapter or whole model. A thread verifies and writes chunks while more arrive."""

    def __init__(self, file: Path, manifest: pb.Manifest) -> None:
        self._file = file
        self._manifest = manifest
        self._writer: ChunkWriter | None = None
        self._waiting: list[Piece] = []
        self._writing: asyncio.Future[None] | None = None
        self._finished = False

    async def write(self, chunk: Piece) -> None:
        """Accept the next chunk. Raises ChecksumMismatch, InvalidShape or DiskFull, for this or an earlier chunk."""
        self._waiting.append(chunk)
        if self._writing is not None and (self._writing.done() or len(self._waiting) >= _MOST_WAITING):
            await self._finish_writing()
        if self._writing is None:
            chunks, self._waiting = self._waiting, []
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, chunks))

    async def adopt(self, file: Path, sealed: Callable[[], Awaitable[pb.Manifest]] | None = None) -> StagedAdapter:
        """Link a file staged by the trainer instead of receiving chunks, and start to verify it.

        `sealed` returns the manifest with its checksums, if they were not known yet. Raises NotLinked if the file
        cannot be linked, ChecksumMismatch unless it has the manifest's tensors.
        """
        await asyncio.to_thread(self._link, file)
        self._finished = True
        verifying = asyncio.create_task(self._verify_linked(sealed))
        return StagedAdapter(self._manifest, self._file.parent, temporary=True, verifying=verifying)

    async def finish(self) -> StagedAdapter:
        """Verify the whole file. Raises as `write`, and ChecksumMismatch if it does not match the manifest."""
        await self._finish_writing()
        await asyncio.to_thread(self._write, self._waiting, are_last=True)
        self._finished = True
        return StagedAdapter(self._manifest, self._file.parent, temporary=True)

    async def close(self) -> None:
        """Remove the files unless `finish` or `adopt` handed them over."""
        if self._finished:
            return
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(shutil.rmtree, self._file.parent, ignore_errors=True)

    def _link(self, file: Path) -> None:
        try:
            os.link(file, self._file, follow_symlinks=False)
        except OSError as error:
            # The path is DIRECTORY / run / version / file. If DIRECTORY exists, only the version was removed from it.
            raise NotLinked(is_shared=error.errno == errno.ENOENT and file.parents[2].is_dir()) from error
        is_regular = stat.S_ISREG(self._file.lstat().st_mode)
        if not is_regular or read_tensor_entries(self._file) != list(self._manifest.tensors):
            raise errors.ChecksumMismatch("the staged file has other tensors than its manifest")

    async def _verify_linked(self, sealed: Callable[[], Awaitable[pb.Manifest]] | None) -> pb.Manifest:
        """Verify a file that is linked from the trainer's staging directory, and return its manifest.

        The file is the same memory for both, so CRC-32C suffices: it detects damage as well as BLAKE3, which the
        trainer computed over these bytes, in a fraction of the time. Nobody else can write there.
        """
        computed = await asyncio.to_thread(crc32c_of, self._file)
        manifest = await sealed() if sealed is not None else self._manifest
        if computed != manifest.crc32c:
            raise errors.ChecksumMismatch("the staged bytes do not match the manifest")
        return manifest

    async def _finish_writing(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _write(self, chunks: Sequence[Piece], *, are_last: bool = False) -> None:
        with _staged():
            if self._writer is None:
                self._writer = ChunkWriter(self._file, self._manifest)
            for chunk in chunks:
                self._writer.write(chunk)
            if are_last:
                self._writer.finish()


async def _close(making: asyncio.Future[AdapterReceiver]) -> None:
    await asyncio.wait({making})
    if making.exception() is None:
        await making.result().close()


@contextmanager
def _staged() -> Iterator[None]:
    """Write staged files. Raises DiskFull, and EngineUnavailable if they were removed meanwhile."""
    try:
        yield
    except FileNotFoundError as error:
        raise errors.EngineUnavailable("the staged files were removed while they arrived; send them again") from error
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        message = "the sampler's staging directory is full; give it more space or keep fewer versions"
        raise errors.DiskFull(message) from error
