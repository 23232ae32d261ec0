"""Versions evicted from memory that wait on disk, from where they are loaded again without the trainer."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from paceline.background import Background
from paceline.errors import DiskFull, EngineUnavailable
from paceline.files.regular_files import copy_file
from paceline.log import get_logger
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.transports.base import StagedAdapter, VersionKey, check_owner
from sampler_service.transports.staging import StagingArea

_log = get_logger(__name__)

_MOST_WRITTEN = 2
"""Most versions being written to disk at a time; each occupies memory until it is written."""

Release = Callable[[StagedAdapter], Awaitable[None]]


class DiskTier:
    """The files of evicted versions. If it is full, the oldest version of the tenant with the most versions is removed.

    So no tenant's versions are removed for those of a tenant that has more.

    Files on the checkpoint volume stay in place, because the trainer keeps what a sampler holds. Files in the staging
    directory, which is in memory, are copied to a scratch directory; a version can be taken back during the copy.
    """

    def __init__(self, scratch: StagingArea | None, most: int) -> None:
        """Keep up to `most` versions; without a scratch directory none from the staging directory."""
        self._scratch = scratch
        self.most = most
        self._waiting: OrderedDict[VersionKey, StagedAdapter] = OrderedDict()
        self._writing = asyncio.Semaphore(_MOST_WRITTEN)
        self._moves = Background("version not kept on disk")

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[StagedAdapter]:
        return iter(list(self._waiting.values()))

    def find(self, key: VersionKey) -> StagedAdapter | None:
        """Return the waiting version with this key, if any."""
        return self._waiting.get(key)

    async def put(self, staged: StagedAdapter, release: Release) -> None:
        """Keep the files of an evicted version; `release` is called with what is dropped: this version or older ones.

        The files are written in the background, unless many others are still being written.
        """
        if not self.most or (staged.in_memory and self._scratch is None):
            await release(staged)
            return
        self._waiting[staged.key] = staged
        if staged.in_memory and self._scratch is not None:
            await self._writing.acquire()
            self._moves.spawn(self._move(staged, self._scratch, release))
        while len(self._waiting) > self.most:
            await release(self._waiting.pop(self._superfluous()))

    def take(self, key: VersionKey, tenant: str) -> StagedAdapter | None:
        """Remove and return a version, if it waits; its bytes are verified again while the caller loads it.

        Raises RunNotFound or CheckpointNotFound if it is another tenant's.
        """
        staged = self._waiting.get(key)
        if staged is None:
            return None
        check_owner(staged.manifest.tenant, key.ref(), tenant)
        del self._waiting[key]
        return replace(staged, verifying=asyncio.create_task(_verify(staged)))

    async def put_back(self, staged: StagedAdapter, release: Release) -> None:
        """Keep a version that was taken and could not be loaded."""
        if staged.verifying is not None:
            staged.verifying.cancel()
        await self.put(replace(staged, verifying=None), release)

    async def replace(self, staged: StagedAdapter) -> None:
        """Drop the waiting copy of weights that were just loaded. Raises VersionExists if its content differs."""
        if (waiting := self._waiting.get(staged.key)) is not None:
            waiting.check_same(staged)
            del self._waiting[staged.key]
            await waiting.discard()

    def remove(self, is_meant: Callable[[StagedAdapter], bool]) -> Sequence[StagedAdapter]:
        """Remove and return all versions that match."""
        return [self._waiting.pop(staged.key) for staged in self if is_meant(staged)]

    def _superfluous(self) -> VersionKey:
        """Return the version to drop: the one that has waited longest among tenants with the most versions."""
        counts = Counter(staged.manifest.tenant for staged in self._waiting.values())
        most = max(counts.values())
        return next(key for key, staged in self._waiting.items() if counts[staged.manifest.tenant] == most)

    async def close(self) -> None:
        """Wait for writes in progress."""
        await self._moves.finish()

    async def _move(self, staged: StagedAdapter, scratch: StagingArea, release: Release) -> None:
        """Move a waiting version from memory to disk, unless it is taken meanwhile."""
        key = staged.key
        try:
            copy = await asyncio.to_thread(_copy, staged, scratch)
        except (OSError, DiskFull, EngineUnavailable) as error:
            if self._waiting.get(key) is staged:
                _log.warning("version not kept on disk", error=str(error))
                await release(self._waiting.pop(key))
            return
        finally:
            self._writing.release()
        superfluous = copy
        # If the version was taken or replaced during the copy, the copy is the superfluous one.
        if self._waiting.get(key) is staged:
            self._waiting[key], superfluous = copy, staged
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
