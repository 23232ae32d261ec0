"""The checkpoints on the volume: saved, found, listed, opened, expired, deleted.

A checkpoint is a directory with the adapter in PEFT's layout, or a whole model, and a manifest; a state checkpoint also
holds optimizer, RNG and counters. A state checkpoint or a whole model also has a SHA256SUMS file over all of its files
(`sha256sum -c` checks it). A checkpoint belongs to the tenant of its run.

A checkpoint may be overwritten or deleted while another call reads it. Code that reads several of its files reads them
from one opened directory, and starts over if that directory lost its name meanwhile, so that it never mixes two saves.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar
from weakref import WeakValueDictionary

from paceline import errors, layout, weights
from paceline.background import Background, uninterrupted
from paceline.files.regular_files import open_file
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.rpc.identity import Identity
from paceline.steady_clock import SteadyClock
from paceline.types import Checkpoint, CheckpointKind, ServedModel
from paceline.weights.summary import summarize
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.checkpoints import expiry
from trainer_service.checkpoints.expiry import Expiry
from trainer_service.checkpoints.newest_states import NO_CHECKPOINT, NewestStates, StateCheckpoint
from trainer_service.failpoints import NO_FAILPOINTS, Failpoints
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.volume_files import tenant_of

Writer = Callable[[Path], Awaitable[None]]
T = TypeVar("T")

_PART_BYTES = 1 << 20
_ALL_READS_FAIL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that are not those of one file."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Announces a file of a download; the parts that follow are its bytes."""

    name: str
    size_bytes: int


class CheckpointStore:
    """Saves, finds, lists and deletes checkpoints. Every path is parsed and validated before it is used."""

    def __init__(
        self,
        volume: layout.Volume,
        failpoints: Failpoints = NO_FAILPOINTS,
        guard: DiskGuard = NO_GUARD,
        clock: SteadyClock | None = None,
    ) -> None:
        """`clock` counts the time to live of checkpoints; without one, as long as this object exists."""
        self._volume = volume
        self._clock = clock or SteadyClock()
        self._guard = guard
        self._failpoints = failpoints
        self._locks: WeakValueDictionary[CheckpointPath, asyncio.Lock] = WeakValueDictionary()
        """Held while a checkpoint gets or loses a name."""
        self._changes = Background("change of a checkpoint not finished")
        self.newest_states = NewestStates(self._read_newest_state)

    async def save(
        self,
        path: CheckpointPath,
        write: Writer,
        *,
        base_model: str,
        base_sha256: str = "",
        tenant: str,
        step: int,
        seq_id: int = 0,
        ttl_seconds: int | None,
        overwrite: bool,
        wait_for_earlier: Callable[[], Awaitable[None]] | None = None,
    ) -> Checkpoint:
        """Have `write` fill a directory and make it the checkpoint `path`, durably and atomically.

        A checkpoint that the same command, `seq_id`, made before a crash is returned unchanged; 0 means no command.
        `wait_for_earlier` waits for the checkpoints that must exist first, which may have the same name. A save that
        fails leaves an existing checkpoint of that name unchanged.
        Raises CheckpointExists unless `overwrite`, DiskFull, OutOfRange for a TTL of 0.
        """
        expires = self._expiry(ttl_seconds)
        final = self._volume.checkpoint(path)
        if (made := await self.find_made_by(path, seq_id)) is not None:
            return made
        _check_free(final, overwrite=overwrite)
        async with AsyncExitStack() as naming:
            async with layout.new_directory_async(final, overwrite=overwrite) as staging:
                await write(staging)
                model = ServedModel(base_model, path.run_id, checkpoint=str(path))
                describe = partial(
                    weights.describe_weights,
                    model=model,
                    tenant=tenant,
                    step=step,
                    seq_id=seq_id,
                    base_sha256=base_sha256,
                    is_saved=True,
                )
                await asyncio.to_thread(_seal, staging, describe, path.kind)
                if wait_for_earlier is not None:
                    await wait_for_earlier()
                await naming.enter_async_context(self._lock(path))
                _check_free(final, overwrite=overwrite)
                self._failpoints.hit("before_checkpoint")
                await asyncio.to_thread(_write_expiry, staging, final, expires)
            self.newest_states.saved(path, seq_id)
            self._guard.measure(final)
            return await asyncio.to_thread(_describe, path, final)

    async def find_made_by(self, path: CheckpointPath, seq_id: int) -> Checkpoint | None:
        """Return the checkpoint that command `seq_id` made before a crash, durable from now on, or None."""
        final = self._volume.checkpoint(path)
        if seq_id and await asyncio.to_thread(_is_made_by, final, seq_id):
            await asyncio.to_thread(layout.sync_directory, final.parent)  # the crash may have come before that
            return await asyncio.to_thread(_describe, path, final)
        return None

    async def link_into(self, path: CheckpointPath, identity: Identity, target: Path, field: str = "path") -> None:
        """Link the files of the caller's checkpoint into an empty directory, or copy them, and verify them.

        Raises CheckpointNotFound, ChecksumMismatch if the checkpoint is damaged.
        """
        directory = self.find(path, identity, field)

        def link(source: Path) -> None:
            for left in target.iterdir():
                left.unlink()
            layout.link_files(source, target)
            _verify(target, path.kind)

        with _found(path, field):
            await asyncio.to_thread(_read_whole, directory, link)

    async def check(self, directory: Path, kind: CheckpointKind) -> None:
        """Verify the files of a checkpoint in any directory. Raises ChecksumMismatch."""
        try:
            await asyncio.to_thread(_verify, directory, kind)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise errors.ChecksumMismatch("a file of the checkpoint is missing", field="path") from error

    def find(self, path: CheckpointPath, identity: Identity, field: str = "path") -> Path:
        """Return the directory of the caller's checkpoint. Raises CheckpointNotFound, also for another tenant's."""
        directory = self._volume.checkpoint(path)
        with _found(path, field), layout.opened(directory) as opened:
            is_mine = identity.is_peer or _owner(directory.parent.parent, opened) == identity.tenant
        if not is_mine:
            raise errors.CheckpointNotFound.of(path, field)
        return directory

    async def download(
        self, path: CheckpointPath, identity: Identity, only: str = "", *, with_data: bool = True
    ) -> AsyncIterator[FileHeader | bytes]:
        """Yield a FileHeader and then the bytes of each file of the caller's checkpoint, or of the file named `only`.

        All files are from one save, even if the checkpoint is overwritten or deleted meanwhile. Raises
        CheckpointNotFound, also if the checkpoint has no such file, and ChecksumMismatch if it holds a link or anything
        else that is no regular file.
        """
        directory = self.find(path, identity)
        with ExitStack() as opened:
            files = await asyncio.to_thread(_open_all, path, directory, opened)
            chosen = {name: file for name, file in files.items() if only in {"", name}}
            if not chosen:
                raise errors.CheckpointNotFound(f"has no such file; it has {', '.join(files)}", field="file")
            for name, file in chosen.items():
                yield FileHeader(name, (await asyncio.to_thread(os.fstat, file.fileno())).st_size)
                while with_data and (part := await asyncio.to_thread(file.read, _PART_BYTES)):
                    yield part

    def find_all(self, identity: Identity, run_id: str = "", kind: CheckpointKind | None = None) -> list[Checkpoint]:
        """Return the caller's checkpoints in no particular order. Reads many files: do not call on the event loop.

        One that cannot be read is left out. Raises OSError if a folder cannot be listed, or if no file can be read.
        """
        found = []
        for each in [run_id] if run_id else self._volume.run_ids():
            try:
                for path in self._volume.checkpoints(each, kind):
                    with suppress(errors.CheckpointNotFound):  # another tenant's, or deleted meanwhile
                        found += self._described(path, identity)
            except OSError as error:
                tenant = tenant_of(self._volume.run(each))
                may_be_mine = tenant is None and (run_id or error.errno in _ALL_READS_FAIL)
                if identity.is_peer or tenant == identity.tenant or may_be_mine:
                    raise
                _log.error("a run's checkpoints cannot be read", run=each, error=str(error))
        return found

    def _described(self, path: CheckpointPath, identity: Identity) -> list[Checkpoint]:
        try:
            return [_describe(path, self.find(path, identity))]
        except (FileNotFoundError, NotADirectoryError):
            return []  # deleted meanwhile
        except OSError as error:
            _skip_unreadable(path, error)
            return []

    def _read_newest_state(self, run_id: str) -> tuple[StateCheckpoint, bool]:
        """Read a file of each state checkpoint of a run; return the newest, and whether all could be read.

        One whose manifest is damaged does not count. Raises OSError as `find_all` does.
        """
        newest, are_all_read = NO_CHECKPOINT, True
        for path in self._volume.checkpoints(run_id, CheckpointKind.STATE):
            try:
                seq_id = _read_whole(self._volume.checkpoint(path), summarize).seq_id
            except (FileNotFoundError, NotADirectoryError, errors.ChecksumMismatch):
                continue  # deleted meanwhile, or damaged
            except OSError as error:
                _skip_unreadable(path, error)
                are_all_read = False
                continue
            if seq_id > newest.seq_id:
                newest = StateCheckpoint(str(path), seq_id)
        return newest, are_all_read

    @uninterrupted
    async def delete(self, path: CheckpointPath, identity: Identity) -> None:
        """Permanently delete the caller's checkpoint, damaged or not. Raises CheckpointNotFound."""
        directory = self.find(path, identity)
        async with self._lock(path):
            with _found(path, "path"):
                await asyncio.to_thread(layout.remove_directory, directory)
            self.newest_states.removed(path)
            self._guard.measure(directory)
            await asyncio.to_thread(expiry.forget, directory)

    @uninterrupted
    async def set_ttl(self, path: CheckpointPath, identity: Identity, ttl_seconds: int | None) -> Checkpoint:
        """Set when the caller's checkpoint expires; None means never.

        Raises CheckpointNotFound, OutOfRange, ChecksumMismatch if the checkpoint is damaged.
        """
        expires = self._expiry(ttl_seconds)
        directory = self.find(path, identity)
        async with self._lock(path):
            with _found(path, "path"):
                made = await asyncio.to_thread(_read_whole, directory, summarize)
                await asyncio.to_thread(expiry.write, directory, made.digest, expires)
                return await asyncio.to_thread(_describe, path, directory)

    async def delete_expired(self) -> list[str]:
        """Delete all expired checkpoints; return their paths. Failures are logged."""
        deleted = []
        for path in await asyncio.to_thread(self._with_expiry):
            directory = self._volume.checkpoint(path)
            async with self._lock(path):
                try:
                    if await asyncio.to_thread(self._is_expired, directory):
                        await asyncio.to_thread(layout.remove_directory, directory)
                        self.newest_states.removed(path)
                        self._guard.measure(directory)
                        await asyncio.to_thread(expiry.forget, directory)
                        deleted.append(str(path))
                except (OSError, errors.PacelineError) as error:
                    _log.warning("checkpoint not expired", path=str(path), error=str(error))
        return deleted

    def _with_expiry(self) -> list[CheckpointPath]:
        known = []
        for path in self._volume.checkpoints():
            with suppress(OSError):  # of a run that cannot be read
                if expiry.is_known(self._volume.checkpoint(path)):
                    known.append(path)
        return known

    def _is_expired(self, directory: Path) -> bool:
        expires = expiry.read(directory, _read_whole(directory, summarize).digest)
        return expires is not None and expires.is_over(self._clock)

    def _expiry(self, ttl_seconds: int | None) -> Expiry | None:
        expiry.check_ttl(ttl_seconds)
        return None if ttl_seconds is None else Expiry.after(self._clock, ttl_seconds)

    def _lock(self, path: CheckpointPath) -> asyncio.Lock:
        return self._locks.setdefault(path, asyncio.Lock())


@contextmanager
def _found(path: CheckpointPath, field: str) -> Iterator[None]:
    """Raise CheckpointNotFound if a file is missing, because a checkpoint may be deleted at any moment."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise errors.CheckpointNotFound.of(path, field) from error


def _read_whole(directory: Path, read: Callable[[Path], T]) -> T:
    """Call `read` on a checkpoint's files, all from one save, and return its result.

    Raises FileNotFoundError if there is no such checkpoint, ChecksumMismatch if it is damaged.
    """
    while True:
        with layout.opened(directory) as opened:
            try:
                return read(opened)
            except (FileNotFoundError, errors.ChecksumMismatch) as error:
                if not opened.samefile(directory):
                    continue  # overwritten meanwhile
                if isinstance(error, errors.ChecksumMismatch):
                    raise
                message = "a file of the checkpoint is missing; load another checkpoint"
                raise errors.ChecksumMismatch(message, field="path") from error


def _open_all(path: CheckpointPath, directory: Path, stack: ExitStack) -> dict[str, BinaryIO]:
    """Open the files of one save, sorted by name."""
    while True:
        files: dict[str, BinaryIO] = {}
        with ExitStack() as trying:
            try:
                with layout.opened(directory) as folder:
                    for each in sorted(folder.iterdir()):
                        files[each.name] = trying.enter_context(open_file(each))
                    is_whole = folder.samefile(directory)
            except FileNotFoundError as error:
                if directory.exists():
                    continue  # overwritten meanwhile
                raise errors.CheckpointNotFound.of(path, "path") from error
            if is_whole:
                stack.enter_context(trying.pop_all())
                return files


def _skip_unreadable(path: CheckpointPath, error: OSError) -> None:
    """Log that a checkpoint cannot be read. Raises the error if no other can be read either."""
    if error.errno in _ALL_READS_FAIL:
        raise error
    _log.error("checkpoint cannot be read", path=str(path), error=str(error))


def _owner(run: Path, checkpoint: Path) -> str | None:
    """Return the tenant that owns a checkpoint: its run's, or its manifest's if no file of the run names one."""
    if (tenant := tenant_of(run)) is not None:
        return tenant
    with suppress(FileNotFoundError, NotADirectoryError, errors.ChecksumMismatch):
        return summarize(checkpoint).tenant
    return None


def _is_made_by(directory: Path, seq_id: int) -> bool:
    """Return whether command `seq_id` made the checkpoint; a damaged one may be overwritten like any other."""
    try:
        return _read_whole(directory, summarize).seq_id == seq_id
    except (FileNotFoundError, NotADirectoryError, errors.ChecksumMismatch):
        return False


def _seal(directory: Path, describe: Callable[[Path], pb.Manifest], kind: CheckpointKind) -> None:
    manifest = describe(directory)
    weights.write_manifest(directory, manifest)
    if kind is CheckpointKind.STATE or weights.is_model(manifest):
        weights.write_sums(directory, manifest)


def _write_expiry(staging: Path, final: Path, moment: Expiry | None) -> None:
    """Record the expiry of the checkpoint in `staging` before it becomes `final`; the present `final` keeps its own."""
    present = None
    with suppress(FileNotFoundError, NotADirectoryError, errors.ChecksumMismatch):
        present = _read_whole(final, summarize).digest
    expiry.write(final, summarize(staging).digest, moment, present)


def _verify(directory: Path, kind: CheckpointKind) -> None:
    manifest = weights.read_manifest(directory)
    if kind is CheckpointKind.SAMPLER and not weights.is_model(manifest):
        weights.verify_adapter(directory, manifest)
    elif name := weights.find_damaged(directory):
        raise errors.ChecksumMismatch(f"{name} is damaged; load another checkpoint", field="path")


def _describe(path: CheckpointPath, directory: Path) -> Checkpoint:
    """Describe a checkpoint, damaged or not. Raises FileNotFoundError if there is none."""
    make = partial(Checkpoint, path=str(path), run_id=path.run_id, kind=path.kind, name=path.name)

    def describe(opened: Path) -> Checkpoint:
        made = summarize(opened)
        return make(
            step=made.step,
            size_bytes=_size_of(opened),
            sha256=made.sha256,
            blake3=made.blake3,
            create_time=made.create_time,
            expire_time=expires.moment if (expires := expiry.read(directory, made.digest)) else None,
        )

    try:
        return _read_whole(directory, describe)
    except errors.ChecksumMismatch as damage:
        with layout.opened(directory) as opened:
            changed = datetime.fromtimestamp(opened.stat().st_mtime, UTC)
            size = _size_of(opened)
            return make(step=0, size_bytes=size, sha256="", blake3="", create_time=changed, damage=damage.message)


def _size_of(directory: Path) -> int:
    return sum(file.lstat().st_size for file in directory.iterdir())


def _check_free(final: Path, *, overwrite: bool) -> None:
    if final.exists() and not overwrite:
        raise errors.CheckpointExists("a checkpoint of this name exists; choose another or overwrite", field="name")
