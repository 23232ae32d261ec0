"""Notices an engine that is there and does nothing, and ends it: it is then replaced as if it had died.

The engine's process beats once a second from a thread beside its loop, with a number that its loop counts up at every
turn, command and pass. No sign at all means that the process is stopped or stuck in code that lets no thread run.
Beats with the same number, while requests wait, mean that the loop hangs: in a kernel, a lock or a collective. A pass
may take long, so the second limit is far above the first.

Time is counted in ticks of this process's event loop: one that was itself stopped finds the engine's signs before it
has counted to the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

_TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an engine may be silent, and how long its loop may stand still while requests wait."""

    silence_seconds: float = 60.0
    stall_seconds: float = 900.0


DEFAULT_PATIENCE = Patience()


class Watchdog:
    """Watches one engine's process."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._silent = self._stalled = 0.0
        self._has_beaten = False
        self._progress = -1

    def heard(self) -> None:
        """Note that something came."""
        self._silent = 0.0

    def beat(self, progress: int) -> None:
        """Note a beat."""
        self._has_beaten = True
        if progress != self._progress:
            self._progress, self._stalled = progress, 0.0

    def moved(self) -> None:
        """Note that the engine's loop did something."""
        self._stalled = 0.0

    async def watch(self, is_busy: Callable[[], bool]) -> str:
        """Return why the engine has to end; `is_busy` says whether its loop has something to do.

        Before the first beat the process starts and imports, which may take as long as a pass.
        """
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._silent += _TICK_SECONDS
            self._stalled = self._stalled + _TICK_SECONDS if is_busy() else 0.0
            limit = self._patience.silence_seconds if self._has_beaten else self._patience.stall_seconds
            if self._silent >= limit:
                return f"it has given no sign for {limit:g} s"
            if self._stalled >= self._patience.stall_seconds:
                return f"its loop has not moved on for {self._patience.stall_seconds:g} s"
