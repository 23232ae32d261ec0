"""The checkpoint store.

A checkpoint is a directory with the adapter in PEFT's layout, or a whole model, and a manifest; a state checkpoint also
holds optimizer, RNG and counters. Beside a state or a whole model stands SHA256SUMS over all of it (`sha256sum -c`
checks it). When a checkpoint expires stands in a file beside it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from paceline import errors, layout, weights
from paceline.codec.times import timestamp_from_proto
from paceline.layout import CheckpointPath
from paceline.rpc.identity import Identity
from paceline.types import Checkpoint, CheckpointKind, ServedModel
from trainer_service.failpoints import NO_FAILPOINTS, Failpoints

Writer = Callable[[Path], Awaitable[None]]


async def _none_earlier() -> None:
    pass


class CheckpointStore:
    """Saves, finds, lists and deletes checkpoints. Every path it touches was taken apart and checked first."""

    def __init__(self, volume: layout.Volume, failpoints: Failpoints = NO_FAILPOINTS) -> None:
        self._volume = volume
        self._failpoints = failpoints

    async def save(
        self,
        path: CheckpointPath,
        write: Writer,
        *,
        base_model: str,
        tenant: str,
        step: int,
        seq_id: int = 0,
        ttl_seconds: int | None,
        overwrite: bool,
        earlier: Callable[[], Awaitable[None]] = _none_earlier,
    ) -> Checkpoint:
        """Let `write` fill a directory and make it the checkpoint `path`, durably and all at once.

        One that the same command, `seq_id`, made before a crash is returned as it is; 0 stands for no command.
        `earlier` waits for those that must be there before it, which may have its name.
        Raises CheckpointExists unless `overwrite`, DiskFull, OutOfRange for a TTL of 0.
        """
        expire_time = _expiry(ttl_seconds)
        final = self._volume.checkpoint(path)
        if seq_id and final.exists() and weights.read_manifest(final).seq_id == seq_id:
            return await asyncio.to_thread(_describe, path, final)
        _check_free(final, overwrite=overwrite)
        async with staged_directory(final, overwrite=overwrite) as staging:
            await write(staging)
            model = ServedModel(base_model, path.run_id, checkpoint=str(path))
            await asyncio.to_thread(_seal, staging, model, tenant, step, seq_id, path.kind)
            await earlier()
            _check_free(final, overwrite=overwrite)
            self._failpoints.hit("before_checkpoint")
            await asyncio.to_thread(_write_expiry, final, expire_time)
        return await asyncio.to_thread(_describe, path, final)

    async def open(self, path: CheckpointPath, identity: Identity, field: str = "path") -> Path:
        """Return the directory of the caller's checkpoint, verified. Raises CheckpointNotFound, ChecksumMismatch."""
        directory = self.find(path, identity, field)
        with _found(field):
            await asyncio.to_thread(_verify, directory, path.kind)
        return directory

    def find(self, path: CheckpointPath, identity: Identity, field: str = "path") -> Path:
        """Return the directory of the caller's checkpoint. Raises CheckpointNotFound, also for another tenant's."""
        directory = self._volume.checkpoint(path)
        with _found(field):
            tenant = weights.read_manifest(directory).tenant
        if not (identity.is_peer or tenant == identity.tenant):
            raise errors.CheckpointNotFound("no such checkpoint", field=field)
        return directory

    def find_all(self, identity: Identity, run_id: str = "", kind: CheckpointKind | None = None) -> list[Checkpoint]:
        """Return the caller's checkpoints, in no order."""
        found = []
        for path in self._paths(run_id):
            if kind not in {None, path.kind}:
                continue
            directory = self._volume.checkpoint(path)
            with suppress(FileNotFoundError):  # deleted since its folder was listed
                if identity.is_peer or weights.read_manifest(directory).tenant == identity.tenant:
                    found.append(_describe(path, directory))
        return found

    async def delete(self, path: CheckpointPath, identity: Identity) -> None:
        """Delete the caller's checkpoint. Raises CheckpointNotFound."""
        directory = self.find(path, identity)
        with _found("path"):
            await asyncio.to_thread(layout.remove_directory, directory)
        _expiry_file(directory).unlink(missing_ok=True)

    async def set_ttl(self, path: CheckpointPath, identity: Identity, ttl_seconds: int | None) -> Checkpoint:
        """Set when the caller's checkpoint expires; None means never. Raises CheckpointNotFound, OutOfRange."""
        expire_time = _expiry(ttl_seconds)
        directory = self.find(path, identity)
        with _found("path"):
            await asyncio.to_thread(_write_expiry, directory, expire_time)
            return _describe(path, directory)

    async def delete_expired(self, now: datetime) -> list[str]:
        """Delete every checkpoint whose time has come; return their paths."""
        expired = []
        for path in self._paths(""):
            directory = self._volume.checkpoint(path)
            expire_time = _read_expiry(directory)
            if expire_time is not None and expire_time <= now:
                with suppress(FileNotFoundError):  # deleted by its owner meanwhile
                    await asyncio.to_thread(layout.remove_directory, directory)
                _expiry_file(directory).unlink(missing_ok=True)
                expired.append(str(path))
        return expired

    def _paths(self, run_id: str) -> Iterator[CheckpointPath]:
        folders = [self._volume.run(run_id)] if run_id else sorted(self._volume.runs.glob("run-*"))
        for folder in folders:
            for kind in CheckpointKind:
                for directory in sorted((folder / kind.folder).glob("[!.]*")):
                    yield CheckpointPath(folder.name, kind, directory.name)


@asynccontextmanager
async def staged_directory(final: Path, *, overwrite: bool = False, durable: bool = True) -> AsyncIterator[Path]:
    """`layout.new_directory` whose file operations do not block the event loop.

    Those on a directory that is not durable take less time than a thread would to begin.
    """
    manager = layout.new_directory(final, overwrite=overwrite, durable=durable)
    if not durable:
        with manager as staging:
            yield staging
        return
    staging = await asyncio.to_thread(manager.__enter__)
    try:
        yield staging
    except BaseException:
        if not await asyncio.to_thread(manager.__exit__, *sys.exc_info()):
            raise
    else:
        await asyncio.to_thread(manager.__exit__, None, None, None)


@contextmanager
def _found(field: str) -> Iterator[None]:
    """Turn the absence of a checkpoint's files, which may be deleted at any moment, into CheckpointNotFound."""
    try:
        yield
    except FileNotFoundError as error:
        raise errors.CheckpointNotFound("no such checkpoint", field=field) from error


def _seal(directory: Path, model: ServedModel, tenant: str, step: int, seq_id: int, kind: CheckpointKind) -> None:
    manifest = weights.describe_weights(directory, model, tenant=tenant, step=step, seq_id=seq_id)
    weights.write_manifest(directory, manifest)
    if kind is CheckpointKind.STATE or weights.is_model(manifest):
        weights.write_sums(directory, manifest)


def _verify(directory: Path, kind: CheckpointKind) -> None:
    manifest = weights.read_manifest(directory)
    if kind is CheckpointKind.SAMPLER and not weights.is_model(manifest):
        weights.verify_adapter(directory, manifest)
    elif name := weights.find_damaged(directory):
        raise errors.ChecksumMismatch(f"{name} is damaged; load another checkpoint", field="path")


def _describe(path: CheckpointPath, directory: Path) -> Checkpoint:
    manifest = weights.read_manifest(directory)
    return Checkpoint(
        path=str(path),
        run_id=path.run_id,
        kind=path.kind,
        name=path.name,
        step=manifest.step,
        size_bytes=sum(file.stat().st_size for file in directory.iterdir()),
        sha256=manifest.model.sha256,
        create_time=timestamp_from_proto(manifest.create_time),
        expire_time=_read_expiry(directory),
    )


def _check_free(final: Path, *, overwrite: bool) -> None:
    if final.exists() and not overwrite:
        raise errors.CheckpointExists("a checkpoint of this name exists; choose another or overwrite", field="name")


def _expiry(ttl_seconds: int | None) -> datetime | None:
    if ttl_seconds is None:
        return None
    if not 0 < ttl_seconds <= 100 * 365 * 86400:
        raise errors.OutOfRange("must be 1 second to 100 years; leave it unset for never", field="ttl_seconds")
    return datetime.now(UTC) + timedelta(seconds=ttl_seconds)


def _expiry_file(directory: Path) -> Path:
    return directory.parent / f".expires-{directory.name}"


def _write_expiry(directory: Path, expire_time: datetime | None) -> None:
    if expire_time is None:
        _expiry_file(directory).unlink(missing_ok=True)
    else:
        layout.write_file(_expiry_file(directory), expire_time.isoformat().encode())


def _read_expiry(directory: Path) -> datetime | None:
    try:
        return datetime.fromisoformat(_expiry_file(directory).read_text())
    except FileNotFoundError:
        return None
