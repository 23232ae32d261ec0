"""Commands that have no answer yet, and what is said of them when a client ends before they have."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("paceline")

_FIRST_NOTICE, _NOTICES = 1.0, 5.0
"""Seconds after which a client that ends says what it waits for, and between repetitions."""
_NAMED = 5
"""Commands that a notice names; the rest are counted."""


@dataclass(eq=False, slots=True)
class Issued:
    """A command that was issued, or several that belong together."""

    name: str
    """RPC, run and seq_ids, for the log."""
    future: Future[Any] = field(repr=False)
    is_asked: bool = False
    """Whether somebody asked for its answer."""
    is_dropped: bool = False
    """Whether nobody can ask any more."""

    def ask(self) -> None:
        """Note that the answer, be it an error, goes to somebody."""
        self.is_asked = True

    def drop(self) -> None:
        """Note that nobody holds its future any more."""
        self.is_dropped = True
        self.future.add_done_callback(lambda _: self.tell())

    def tell(self) -> None:
        """Say in the log that it failed, if it did and nobody asked."""
        if not self.is_asked and self.has_failed:
            self.is_asked = True
            _log.error("%s failed, and nobody asked for its answer: %s", self.name, self.future.exception())

    @property
    def has_failed(self) -> bool:
        """Whether it ended in an error."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is not None


class Outstanding:
    """The commands of one client that somebody may still have to hear of."""

    def __init__(self) -> None:
        self._pending: dict[int, Issued] = {}
        self._failed: list[Issued] = []
        self._change = asyncio.Event()
        self._is_closed = False

    def add(self, name: str, future: Future[Any], loop: asyncio.AbstractEventLoop) -> Issued:
        """Take in a command."""
        issued = Issued(name, future)
        self._pending[id(issued)] = issued
        future.add_done_callback(lambda _: self._end(issued, loop))
        return issued

    async def settle(self, seconds: float) -> None:
        """Wait until every command is answered, at most so long, and say in the log what is waited for."""
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
        """Say in the log what will have no answer, and what failed without anybody asking; nothing is awaited later."""
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
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(self._change.set)

    def _describe(self) -> str:
        pending = list(self._pending.values())
        named = ", ".join(issued.name for issued in pending[:_NAMED])
        return f"{len(pending)} command(s): {named}{', ...' if len(pending) > _NAMED else ''}"
