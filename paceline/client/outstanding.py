"""Tracking of unanswered commands, and log messages about them when a client is closed."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("paceline")

_FIRST_NOTICE, _NOTICES = 1.0, 5.0
"""Seconds until a closing client first logs what it waits for, and between repetitions."""
_NAMED = 5
"""Number of commands that a notice names; the rest are counted."""


@dataclass(eq=False, slots=True)
class Issued:
    """An issued command, or several that belong together."""

    name: str
    """RPC, run and seq_ids, for the log."""
    future: Future[Any] = field(repr=False)
    is_asked: bool = False
    """Whether the answer was requested."""
    is_dropped: bool = False
    """Whether the answer can no longer be requested."""

    def ask(self) -> None:
        """Record that the answer, or error, is delivered to a caller."""
        self.is_asked = True

    def drop(self) -> None:
        """Record that no caller holds the future any more."""
        self.is_dropped = True
        self.future.add_done_callback(lambda _: self.tell())

    def tell(self) -> None:
        """Log the failure, if the command failed and its answer was never requested."""
        if not self.is_asked and self.has_failed:
            self.is_asked = True
            _log.error("%s failed, and nobody asked for its answer: %s", self.name, self.future.exception())

    @property
    def has_failed(self) -> bool:
        """Whether the command ended in an error."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is not None


class Outstanding:
    """The commands of one client that are unanswered, or failed without their answer being requested."""

    def __init__(self) -> None:
        self._pending: dict[int, Issued] = {}
        self._failed: list[Issued] = []
        self._change = asyncio.Event()
        self._is_closed = False

    def add(self, name: str, future: Future[Any], loop: asyncio.AbstractEventLoop) -> Issued:
        """Track a command."""
        issued = Issued(name, future)
        self._pending[id(issued)] = issued
        future.add_done_callback(lambda _: self._end(issued, loop))
        return issued

    async def settle(self, seconds: float) -> None:
        """Wait up to `seconds` until every command is answered, and log what is being waited for."""
        clock, notice = asyncio.get_running_loop().time, _FIRST_NOTICE
        deadline = clock() + (0 if self._is_closed else seconds)
        while self._pending and (left := deadline - clock()) > 0:
            self._change.clear()
            try:
                await asyncio.wait_for(self._change.wait(), min(notice, left))
            except TimeoutError:
                notice = _NOTICES
                if self._pending:
                    message = "the client ends; it waits up to %.0f s more for %s (Ctrl-C gives up)"
                    _log.warning(message, max(0.0, deadline - clock()), self._describe())

    def close(self) -> None:
        """Log the commands left unanswered and unreported failures; later `settle` calls do not wait."""
        if not self._is_closed and self._pending:
            message = "the client ended without answers to %s: those that the trainer had not taken are lost"
            _log.error(message, self._describe())
        self._is_closed = True
        for issued in self._pending.values():
            issued.ask()
        for issued in self._failed:
            issued.tell()

    def _end(self, issued: Issued, loop: asyncio.AbstractEventLoop) -> None:
        del self._pending[id(issued)]
        self._failed = [one for one in self._failed if not one.is_asked]
        if issued.has_failed:
            self._failed.append(issued)
        with suppress(RuntimeError):  # the loop has ended, so nothing waits
            loop.call_soon_threadsafe(self._change.set)

    def _describe(self) -> str:
        pending = list(self._pending.values())
        named = ", ".join(issued.name for issued in pending[:_NAMED])
        return f"{len(pending)} command(s): {named}{', ...' if len(pending) > _NAMED else ''}"
