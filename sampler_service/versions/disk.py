"""Versions that gave way to others in memory and wait on disk, from where they come back without the trainer."""

from __future__ import annotations

import asyncio
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline import errors
from paceline.layout import WEIGHTS_FILE
from paceline.log import get_logger
from paceline.types import ServedModel
from paceline.weights import hash_file, served_model
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.versions.bridges import StagedAdapter
from sampler_service.versions.keys import VersionKey
from sampler_service.versions.staging import StagingArea

_log = get_logger(__name__)


class DiskTier:
    """The files of versions that were loaded before. When it is full, those that came longest ago go.

    What lies on the checkpoint volume stays where it is: the trainer keeps what a sampler holds. What lies in the
    staging directory, which is memory, is copied into a scratch directory.
    """

    def __init__(self, scratch: StagingArea | None, most: int) -> None:
        """Take up to `most` versions; without a scratch directory none from the staging directory."""
        self._scratch = scratch
        self.most = most
        self._waiting: OrderedDict[VersionKey, StagedAdapter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter([served_model(staged.manifest) for staged in self._waiting.values()])

    @property
    def size_bytes(self) -> int:
        """Bytes of the versions' safetensors files."""
        return sum(staged.manifest.total_size for staged in self._waiting.values())

    def find(self, key: VersionKey) -> StagedAdapter | None:
        """Return what waits under a key."""
        return self._waiting.get(key)

    async def put(self, staged: StagedAdapter) -> Sequence[StagedAdapter]:
        """Take the files of a version that leaves memory; return what has to go: itself, or those before it."""
        if not self.most:
            return [staged]
        if staged.in_memory:
            if self._scratch is None:
                return [staged]
            try:
                staged = await asyncio.to_thread(_move, staged, self._scratch)
            except OSError as error:
                _log.warning("version not kept on disk", error=str(error))
                return [staged]
        self._waiting[VersionKey.of(served_model(staged.manifest))] = staged
        return [self._waiting.popitem(last=False)[1] for _ in range(len(self._waiting) - self.most)]

    def take(self, key: VersionKey) -> StagedAdapter | None:
        """Give up a version, whose bytes are verified again while it is loaded."""
        staged = self._waiting.pop(key, None)
        if staged is None:
            return None
        return replace(staged, verifying=asyncio.create_task(asyncio.to_thread(_verify, staged)))

    def remove(self, is_meant: Callable[[ServedModel], bool]) -> Sequence[StagedAdapter]:
        """Give up all versions that are meant."""
        keys = [VersionKey.of(served) for served in self if is_meant(served)]
        return [self._waiting.pop(key) for key in keys]


def _move(staged: StagedAdapter, scratch: StagingArea) -> StagedAdapter:
    directory = scratch.allocate(staged.manifest)
    try:
        shutil.copyfile(staged.directory / WEIGHTS_FILE, directory / WEIGHTS_FILE)
    except BaseException:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(staged.directory)
    return StagedAdapter(staged.manifest, directory, temporary=True, on_disk=True)


def _verify(staged: StagedAdapter) -> pb.Manifest:
    if hash_file(staged.directory / WEIGHTS_FILE) != staged.sha256:
        raise errors.ChecksumMismatch("the bytes on disk are not those of the manifest")
    return staged.manifest
