"""Where adapters are put together that arrive in chunks: a directory of this process, in memory where possible."""

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
from paceline.layout import CONFIG_FILE
from paceline.own_directory import OwnDirectory
from paceline.weights import ChunkWriter, Piece, crc32c_of, is_model, read_tensor_entries, weights_file
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import StagedAdapter

Sealed = Callable[[], Awaitable[pb.Manifest]]
_MOST_WAITING = 1
"""Chunks that wait while the thread writes those before; then the sender has to, and memory stays at two chunks."""


class NotLinked(Exception):
    """A file of the trainer's cannot be linked from here."""

    def __init__(self, *, is_shared: bool) -> None:
        """Say whether the trainer's staging directory is seen from here all the same."""
        super().__init__()
        self.is_shared = is_shared


class StagingArea:
    """A directory that this process alone can read; it goes with the process, or when the next sampler starts."""

    def __init__(self, root: Path) -> None:
        """Remove what samplers left in `root` that did not end well, and make a new directory there."""
        self._own = OwnDirectory(root, "paceline-sampler")
        self._clearing = Background("staged files not removed")

    def close(self) -> None:
        """Remove the directory with all that is in it."""
        self._own.close()

    def allocate(self, manifest: pb.Manifest) -> Path:
        """Make a directory for weights, with an adapter's configuration and not yet with them; it is the caller's.

        Raises DiskFull; then there is none.
        """
        directory = self._own.path / uuid4().hex
        directory.mkdir()
        try:
            with _room():
                if not is_model(manifest):
                    (directory / CONFIG_FILE).write_bytes(manifest.adapter_config)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return directory

    @asynccontextmanager
    async def receive(self, manifest: pb.Manifest) -> AsyncIterator[AdapterReceiver]:
        """Give a reception for one adapter or whole model; unless it finishes, its files vanish when the block ends."""
        making = asyncio.ensure_future(asyncio.to_thread(lambda: AdapterReceiver(self.allocate(manifest), manifest)))
        try:
            yield await asyncio.shield(making)
        finally:
            # A caller may leave at any moment, and again while it is leaving: the thread makes the files all the same.
            await asyncio.shield(self._clearing.spawn(_close(making)))


class AdapterReceiver:
    """Puts one adapter together. A thread verifies and writes what has come while more is coming."""

    def __init__(self, directory: Path, manifest: pb.Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._file = directory / weights_file(manifest)
        self._writer = ChunkWriter(self._file, manifest)
        self._waiting: list[Piece] = []
        self._writing: asyncio.Future[None] | None = None
        self._finished = False

    async def write(self, chunk: Piece) -> None:
        """Take the next chunk. Raises ChecksumMismatch, InvalidShape or DiskFull, for this one or one before it."""
        self._waiting.append(chunk)
        if self._writing is not None and (self._writing.done() or len(self._waiting) >= _MOST_WAITING):
            await self._settle()
        if self._writing is None:
            chunks, self._waiting = self._waiting, []
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, chunks))

    async def adopt(self, file: Path, sealed: Sealed) -> StagedAdapter:
        """Link a file staged by the trainer instead of taking chunks, and begin to verify it.

        `sealed` brings the manifest with its checksums. Raises NotLinked where the file cannot be linked,
        ChecksumMismatch unless it has the manifest's tensors.
        """
        await asyncio.to_thread(self._link, file)
        self._finished = True
        verifying = asyncio.create_task(_verify_linked(self._file, sealed))
        return StagedAdapter(self._manifest, self._directory, temporary=True, verifying=verifying)

    async def finish(self) -> StagedAdapter:
        """Verify the whole. Raises as `write`, and ChecksumMismatch unless it is what the manifest describes."""
        await self._settle()
        await asyncio.to_thread(self._verify)
        self._finished = True
        return StagedAdapter(self._manifest, self._directory, temporary=True)

    async def close(self) -> None:
        """Remove the files unless they were handed on by `finish`."""
        if self._finished:
            return
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        self._writer.close()
        await asyncio.to_thread(shutil.rmtree, self._directory)

    def _link(self, file: Path) -> None:
        self._writer.close()
        weights = self._file
        weights.unlink()
        try:
            os.link(file, weights, follow_symlinks=False)
        except OSError as error:
            # A version that has left the directory leaves it as it was: DIRECTORY / run / version / file.
            raise NotLinked(is_shared=error.errno == errno.ENOENT and file.parents[2].is_dir()) from error
        if not stat.S_ISREG(weights.lstat().st_mode) or read_tensor_entries(weights) != list(self._manifest.tensors):
            raise errors.ChecksumMismatch("the staged file has other tensors than its manifest")

    async def _settle(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _write(self, chunks: Sequence[Piece]) -> None:
        with _room():
            for chunk in chunks:
                self._writer.write(chunk)

    def _verify(self) -> None:
        self._write(self._waiting)
        with _room():
            self._writer.finish()


async def _close(making: asyncio.Future[AdapterReceiver]) -> None:
    await asyncio.wait({making})
    if making.exception() is None:
        await making.result().close()


async def _verify_linked(weights: Path, sealed: Sealed) -> pb.Manifest:
    """Return the manifest of the trainer's own file.

    What lies in one memory for both is verified by CRC-32C: it finds damage as SHA-256 does, which the trainer computed
    over these bytes, at a fraction of the time. Nobody else can write there.
    """
    computed = await asyncio.to_thread(crc32c_of, weights)
    manifest = await sealed()
    if computed != manifest.crc32c:
        raise errors.ChecksumMismatch("the staged bytes are not those of the manifest")
    return manifest


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        message = "the sampler's staging directory is full; give it more room or keep fewer versions"
        raise errors.DiskFull(message) from error
