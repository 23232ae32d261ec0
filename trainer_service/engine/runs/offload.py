"""Offload runs that do not fit into memory to disk, least recently used first."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import DiskFull, OutOfMemory, PacelineError
from trainer_service.engine.distributed.ranks import Ranks
from trainer_service.engine.runs import state_files
from trainer_service.engine.runs.async_save import StagingMemory
from trainer_service.engine.runs.run import EngineRun
from trainer_service.engine_link.options import EngineOptions

_NO_COPIES = StagingMemory(0)
"""No memory for copies: an offloaded run is written immediately."""


class RunOffloader:
    """Keeps the runs in memory within `limit_bytes`; None means that all stay in memory.

    A run's size is the most that it may hold between commands: its weights, a gradient and optimizer state. An
    offloaded run is written completely to `scratch` and restored bit for bit. Nothing in `scratch` outlives the engine:
    after a restart, runs are rebuilt from the journal.
    """

    def __init__(self, limit_bytes: int | None, scratch: Path) -> None:
        self._limit = limit_bytes
        self._scratch = scratch
        self._resident: dict[str, EngineRun] = {}
        """Least recently used first."""
        if limit_bytes is not None:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(mode=0o700, parents=True)

    def free_memory(self, size: int) -> None:
        """Offload runs until `size` more bytes fit. Raises OutOfMemory, DiskFull."""
        if self._limit is None:
            return
        if size > self._limit:
            message = (
                f"the run needs {size} bytes, and runs may take {self._limit}; raise run_memory_gib, or train less."
            )
            raise OutOfMemory(message, metadata={"bytes": str(size), "limit_bytes": str(self._limit)})
        self._evict(size, keep=())

    def add(self, run: EngineRun) -> None:
        """Add a run that was created in the memory freed for it."""
        self._resident[run.run_id] = run

    def use(self, runs: Sequence[EngineRun]) -> None:
        """Load those of the runs that are offloaded, and mark all as used.

        Raises OutOfMemory, DiskFull. The runs must fit into memory together (see `fitting`).
        """
        for run in runs:
            if run.run_id not in self._resident:
                self._evict(run.reserved_bytes, keep=runs)
                self._reload(run)
            self._resident[run.run_id] = self._resident.pop(run.run_id)

    def fitting(self, runs: Sequence[EngineRun]) -> int:
        """Return how many of the runs, from the first, fit into memory together; at least one."""
        if self._limit is None:
            return len(runs)
        sizes = itertools.accumulate(run.reserved_bytes for run in runs)
        return max(1, sum(size <= self._limit for size in sizes))

    def forget(self, run: EngineRun) -> None:
        """Remove a deleted run and its files."""
        self._resident.pop(run.run_id, None)
        shutil.rmtree(self._directory(run), ignore_errors=True)

    def _evict(self, size: int, keep: Sequence[EngineRun]) -> None:
        limit = self._limit or 0
        for run in [run for run in self._resident.values() if run not in keep]:
            if sum(other.reserved_bytes for other in self._resident.values()) + size <= limit:
                return
            self._offload(run)

    def _offload(self, run: EngineRun) -> None:
        directory = self._directory(run)
        try:
            directory.mkdir()
            state_files.capture(run, _NO_COPIES).write(directory)
        except (OSError, DiskFull) as error:
            shutil.rmtree(directory, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else "it is full"
            raise DiskFull(f"idle runs cannot be written to scratch_dir: {reason}; free space there.") from error
        run.release()
        del self._resident[run.run_id]

    def _reload(self, run: EngineRun) -> None:
        directory = self._directory(run)
        try:
            run.reallocate()
            state_files.load(run, directory)
        except PacelineError as damage:
            # When the engine restarts, the run is rebuilt from its journal.
            raise SystemExit(f"the offloaded run {run.run_id} cannot be read: {damage}") from damage
        except BaseException:
            run.release()
            raise
        self._resident[run.run_id] = run
        shutil.rmtree(directory)

    def _directory(self, run: EngineRun) -> Path:
        return self._scratch / run.run_id


def make_offloader(options: EngineOptions, ranks: Ranks) -> RunOffloader:
    """Create a rank's offloader, with its own directory if there are several ranks. All ranks call this together."""
    scratch = Path(options.scratch_dir)
    if options.run_memory_bytes is not None and ranks.size > 1:
        ranks.together(lambda: shutil.rmtree(scratch, ignore_errors=True) if ranks.leads else None)
        scratch /= str(ranks.rank)
    return RunOffloader(options.run_memory_bytes, scratch)
