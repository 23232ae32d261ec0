"""Copies of staged versions on the checkpoint volume. A copy that fails is made again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline import errors, layout, weights
from paceline.log import get_logger
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.limits.disk_guard import DiskGuard, Reservation, size_of

ANSWER_SECONDS = 0.2
"""How long a version's copy to the volume lets the answer to its publish go first, whatever samplers do."""
COPY_AGAIN_SECONDS = 5.0
"""How long after a failed copy the next one of its run is made, if nothing needs a version on the volume earlier."""
_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class VersionCopy:
    """A version that has a copy on the volume or gets one; a whole model is made there and needs none."""

    manifest: pb.Manifest
    directory: Path
    """Where the version was made."""
    reservation: Reservation | None = None
    """The version's bytes, until they are counted on the volume. The copy takes it: it is released when that ends."""
    failures: int = 0
    """How often the volume did not take it."""
    is_kept: bool = True
    """Whether the version is still wanted."""

    @property
    def run_id(self) -> str:
        return self.manifest.model.run_id

    @property
    def version(self) -> int:
        return int(self.manifest.model.version)

    @property
    def key(self) -> tuple[str, int]:
        return self.run_id, self.version

    def release(self) -> None:
        """Release the reservation, if it has one."""
        if self.reservation is not None:
            self.reservation.release()


class VolumeCopies:
    """Copies versions to the volume, and knows which ones it has not taken."""

    def __init__(
        self, volume: layout.Volume, guard: DiskGuard, when_copied: Callable[[VersionCopy], Awaitable[None]]
    ) -> None:
        """`when_copied` is called after each copy, and is part of it."""
        self._volume = volume
        self._guard = guard
        self._when_copied = when_copied
        self._in_progress: dict[tuple[str, int], tuple[VersionCopy, asyncio.Task[None]]] = {}
        self._failed: dict[tuple[str, int], VersionCopy] = {}
        """Versions that the volume has not taken and that are not being copied."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """When the next of these is copied, by run."""

    async def stop(self) -> None:
        """Finish the copies in progress, and make no other."""
        while self._in_progress:  # the end of one may start another
            await asyncio.gather(*(task for _, task in self._in_progress.values()), return_exceptions=True)
        self._failed.clear()
        for timer in self._timers.values():
            timer.cancel()

    def start(self, copy: VersionCopy, answered: asyncio.Event | None = None) -> asyncio.Task[None]:
        """Copy a version, if it may wait after its publish is `answered`, and again later if that fails."""
        task = asyncio.create_task(self._copy(copy, answered))
        self._in_progress[copy.key] = (copy, task)
        task.add_done_callback(lambda done: self._ended(copy, done))
        return task

    def start_if_free(self, copy: VersionCopy) -> None:
        """Copy a version as soon as the volume has space for it."""
        self._failed[copy.key] = copy
        self._copy_next(copy.run_id)

    async def settled(self, run_id: str) -> None:
        """Wait until a run's versions are on the volume. Raises the error that keeps one from it, or DiskFull.

        What the volume did not take is copied again, up to the first version that it does not take now. A version that
        a killed trainer copied is on the volume too, but perhaps its name was not synced.
        """
        in_progress = [copy for copy, _ in self._in_progress.values() if copy.run_id == run_id]
        for copy in [*in_progress, *self._failed_of(run_id)]:
            if copy.key in self._failed:  # also since this began
                self._start_again(copy)
            if copy.key in self._in_progress:
                await self._in_progress[copy.key][1]
        with suppress(FileNotFoundError):  # no version was published
            await asyncio.to_thread(layout.sync_directory, self._volume.version(run_id, 0).parent)

    def drop(self, run_id: str, version: int) -> None:
        """Make no other copy of a version that is no longer kept."""
        key = (run_id, version)
        self._failed.pop(key, None)
        if key in self._in_progress:
            self._in_progress[key][0].is_kept = False

    async def forget(self, run_id: str) -> None:
        """Wait for a deleted run's copies in progress, and make no other."""
        while tasks := self._tasks(run_id):
            await asyncio.gather(*tasks, return_exceptions=True)
        for copy in self._failed_of(run_id):
            del self._failed[copy.key]

    def _tasks(self, run_id: str) -> list[asyncio.Task[None]]:
        return [task for copy, task in self._in_progress.values() if copy.run_id == run_id]

    def _failed_of(self, run_id: str) -> list[VersionCopy]:
        return [copy for copy in self._failed.values() if copy.run_id == run_id]

    async def _copy(self, copy: VersionCopy, answered: asyncio.Event | None) -> None:
        if answered is not None:
            # The caller waits for the sync of the answer, which takes several times as long beside those of the copy.
            with suppress(TimeoutError):
                await asyncio.wait_for(answered.wait(), ANSWER_SECONDS)
        final = self._volume.version(copy.run_id, copy.version)
        if final.exists():  # perhaps the sync of its name failed, or a trainer was killed before that
            await asyncio.to_thread(layout.sync_directory, final.parent)
        else:
            async with layout.new_directory_async(final) as staging:
                await asyncio.to_thread(_copy_files, copy.directory, staging)
                await asyncio.to_thread(weights.write_manifest, staging, copy.manifest)
        self._guard.measure(final)
        copy.release()
        await self._when_copied(copy)

    def _ended(self, copy: VersionCopy, task: asyncio.Task[None]) -> None:
        copy.release()
        del self._in_progress[copy.key]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error(
                "copying the version to the volume failed", run=copy.run_id, version=copy.version, error=str(error)
            )
        if copy.is_kept and (error is not None or task.cancelled()):
            copy.failures += 1
            self._failed[copy.key] = copy
            self._copy_next_after(COPY_AGAIN_SECONDS, copy.run_id)
        elif self._failed_of(copy.run_id):
            self._copy_next_after(0.0, copy.run_id)

    def _copy_next_after(self, seconds: float, run_id: str) -> None:
        """Set the time of a run's next copy, in place of the one that was set."""
        self._cancel_timer(run_id)
        self._timers[run_id] = asyncio.get_running_loop().call_later(seconds, self._copy_next, run_id)

    def _copy_next(self, run_id: str) -> None:
        """Copy one of the versions that the volume did not take, or set a time to try again if it is full.

        It is the newest of those that failed least often. The others follow once the volume takes one, so that a volume
        that fails is not asked to take all of them each time.
        """
        self._cancel_timer(run_id)
        if not (failed := self._failed_of(run_id)):
            return
        try:
            self._start_again(min(failed, key=lambda copy: (copy.failures, -copy.version)))
        except (errors.DiskFull, OSError):
            self._copy_next_after(COPY_AGAIN_SECONDS, run_id)

    def _cancel_timer(self, run_id: str) -> None:
        if (timer := self._timers.pop(run_id, None)) is not None:
            timer.cancel()

    def _start_again(self, copy: VersionCopy) -> None:
        """Start a failed copy again. Raises DiskFull if the volume has no space for it and those in progress."""
        in_progress = (each for each, _ in self._in_progress.values())
        self._guard.check_free(self._volume.root, sum(map(self._missing_bytes, [copy, *in_progress])))
        del self._failed[copy.key]
        self.start(copy)

    def _missing_bytes(self, copy: VersionCopy) -> int:
        is_there = self._volume.version(copy.run_id, copy.version).exists()
        return 0 if is_there else size_of(copy.directory)


def _copy_files(source: Path, target: Path) -> None:
    """Copy the files of a flat directory. Raises OSError with its errno, which `shutil.copytree` leaves out."""
    for path in source.iterdir():
        shutil.copy2(path, target)
