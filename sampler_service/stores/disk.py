"""Versions evicted from memory that wait on disk, from where they are loaded again without the trainer."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from paceline.background import Background
from paceline.errors import DiskFull, EngineUnavailable
from paceline.files.regular_files import copy_file
from paceline.log import get_logger
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.stores.version import Version, VersionState, VersionTable
from sampler_service.transports.base import StagedAdapter, VersionKey, check_owner
from sampler_service.transports.staging import StagingArea

_log = get_logger(__name__)

_MOST_WRITTEN = 2
"""Most versions being written to disk at a time; each occupies memory until it is written."""

Release = Callable[[Version], Awaitable[None]]
"""Moves a version to RELEASED, before anything is awaited, and removes its files."""


class DiskTier:
    """Versions that are ON_DISK. If it is full, the oldest version of the tenant with the most versions is removed.

    So no tenant's versions are removed for those of a tenant that has more.

    Files on the checkpoint volume stay in place, because the trainer keeps what a sampler holds. Files in the staging
    directory, which is in memory, are copied to a scratch directory; a version can be taken back during the copy.
    """

    def __init__(self, table: VersionTable, scratch: StagingArea | None, most: int) -> None:
        """Keep up to `most` versions of a table; without a scratch directory none from the staging directory."""
        self.table = table
        self._scratch = scratch
        self.most = most
        self._writing = asyncio.Semaphore(_MOST_WRITTEN)
        self._moves = Background("version not kept on disk")

    def __len__(self) -> int:
        return len(self._waiting())

    def __iter__(self) -> Iterator[Version]:
        return iter(self._waiting())

    async def put(self, version: Version, release: Release) -> None:
        """Keep a version whose files the engine does not use; `release` is called with what goes: this or older ones.

        The files are written in the background, unless many others are still being written.
        """
        staged = version.staged
        if not self.most or (staged.in_memory and self._scratch is None):
            await release(version)
            return
        self.table.move(version, VersionState.ON_DISK)
        if staged.in_memory and self._scratch is not None:
            await self._writing.acquire()
            self._moves.spawn(self._move(version, staged, self._scratch, release))
        while len(self) > self.most:
            await release(self._superfluous())

    def take(self, key: VersionKey, tenant: str) -> Version | None:
        """Return a version, if it waits: it is ARRIVING, and its bytes are verified again while the caller loads it.

        Raises RunNotFound or CheckpointNotFound if it is another tenant's.
        """
        version = next(iter(self.table.of({VersionState.ON_DISK}, key)), None)
        if version is None:
            return None
        check_owner(version.tenant, key.ref(), tenant)
        self.table.move(version, VersionState.ARRIVING)
        verifying = asyncio.create_task(_verify(version.staged))
        version.staged = replace(version.staged, verifying=verifying)
        return version

    async def put_back(self, version: Version, release: Release) -> None:
        """Keep a version that was taken and could not be loaded."""
        if version.staged.verifying is not None:
            version.staged.verifying.cancel()
        version.staged = replace(version.staged, verifying=None)
        await self.put(version, release)

    def _waiting(self) -> list[Version]:
        return self.table.of({VersionState.ON_DISK})

    def _superfluous(self) -> Version:
        """Return the version to drop: the one that has waited longest among tenants with the most versions."""
        waiting = self._waiting()
        counts = Counter(version.tenant for version in waiting)
        most = max(counts.values())
        return next(version for version in waiting if counts[version.tenant] == most)

    async def close(self) -> None:
        """Wait for writes in progress."""
        await self._moves.finish()

    async def _move(self, version: Version, staged: StagedAdapter, scratch: StagingArea, release: Release) -> None:
        """Move a waiting version's files from memory to disk, unless it is taken meanwhile."""

        def still_waits() -> bool:
            # One that was taken and put back has other staged files, which another move writes.
            return version.state is VersionState.ON_DISK and version.staged is staged

        try:
            copy = await asyncio.to_thread(_copy, staged, scratch)
        except (OSError, DiskFull, EngineUnavailable) as error:
            if still_waits():
                _log.warning("version not kept on disk", error=str(error))
                await release(version)
            return
        finally:
            self._writing.release()
        superfluous = copy
        if still_waits():
            version.staged, superfluous = copy, staged
        await superfluous.discard()


def _copy(staged: StagedAdapter, scratch: StagingArea) -> StagedAdapter:
    file = scratch.allocate(staged.manifest)
    try:
        copy_file(staged.directory / file.name, file)
    except BaseException:
        shutil.rmtree(file.parent)
        raise
    return StagedAdapter(staged.manifest, file.parent, temporary=True, on_disk=True)


async def _verify(staged: StagedAdapter) -> pb.Manifest:
    await staged.verify_again()
    return staged.manifest
