"""Detect an engine that hangs, so that it is killed and replaced as if it had died.

The engine process sends a heartbeat once a second from a thread beside its loop, with a number that the loop increments
at every turn, command and pass. No heartbeat at all means that the process is stopped, or stuck in code that lets no
thread run. Heartbeats with the same number while requests wait mean that the loop hangs: in a kernel, a lock or a
collective. A pass may take long, so the second limit is far above the first.

If there are several ranks, each has heartbeats of its own: a stopped rank leaves the others waiting in a collective.

Time is counted in ticks of this process's event loop. If this process was itself stopped, it receives the engine's
heartbeats before it has counted to the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an engine may be silent, and how long its loop may make no progress while requests wait."""

    silence_seconds: float = 60.0
    stall_seconds: float = 900.0


DEFAULT_PATIENCE = Patience()


class RankHeartbeats:
    """Heartbeats of an engine's ranks: each writes its process id into a file and touches it once a second."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._files = [heartbeat_file(directory, rank) for rank in range(ranks)] if ranks > 1 else []
        self._seen: dict[int, int] = {}
        """Last modification time of each file, by rank, in nanoseconds of its own clock."""

    def new(self) -> list[int]:
        """Return the ranks that have sent a heartbeat since the last call."""
        touched = {rank: file.stat().st_mtime_ns for rank, file in enumerate(self._files) if file.exists()}
        ranks = [rank for rank, time in touched.items() if self._seen.get(rank) != time]
        self._seen = touched
        return ranks

    def processes(self) -> list[int]:
        """Return the process ids of the ranks that have started."""
        return [int(file.read_text()) for file in self._files if file.exists()]


def heartbeat_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat file."""
    return directory / f"heartbeat-{rank}"


def write_heartbeat(file: Path, process: int) -> None:
    """Write a rank's process id atomically."""
    staging = file.with_suffix(".new")
    staging.write_text(str(process))
    staging.replace(file)


class Watchdog:
    """Watches one engine's processes."""

    def __init__(self, patience: Patience, ranks: int = 1) -> None:
        self._patience = patience
        self._silent = [0.0] * ranks
        self._stalled = 0.0
        self._has_beaten = [False] * ranks
        self._progress = -1

    def note_data(self) -> None:
        """Note that data arrived through the pipe, which rank 0 holds."""
        self._silent[0] = 0.0

    def note_heartbeat(self, progress: int) -> None:
        """Note a heartbeat of rank 0."""
        self._has_beaten[0] = True
        if progress != self._progress:
            self._progress, self._stalled = progress, 0.0

    def note_progress(self) -> None:
        """Note that the engine's loop made progress."""
        self._stalled = 0.0

    async def watch(self, is_busy: Callable[[], bool], heartbeats: Callable[[], Iterable[int]]) -> str:
        """Wait until the engine has to be killed, and return why.

        `is_busy` returns whether its loop has work, and `heartbeats` which ranks sent one since its last call. Before
        its first heartbeat a process starts and imports modules, which may take as long as a pass.
        """
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._stalled = self._stalled + _TICK_SECONDS if is_busy() else 0.0
            self._silent = [silent + _TICK_SECONDS for silent in self._silent]
            for rank in heartbeats():
                self._has_beaten[rank], self._silent[rank] = True, 0.0
            for rank, silent in enumerate(self._silent):
                limit = self._patience.silence_seconds if self._has_beaten[rank] else self._patience.stall_seconds
                if silent >= limit:
                    return f"rank {rank} has sent no heartbeat for {limit:g} s"
            if self._stalled >= self._patience.stall_seconds:
                return f"its loop has made no progress for {self._patience.stall_seconds:g} s"
