"""Work that goes on whether or not anybody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.log import get_logger

T = TypeVar("T")

_log = get_logger(__name__)


class Background:
    """Tasks that end by themselves; what goes wrong in one is logged."""

    def __init__(self, what: str) -> None:
        """Take what a failure is called in the log."""
        self._what = what
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Begin something; whoever waits for it all the same shields it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what comes of work that goes on to its end when the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._answered)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait until everything has ended by itself."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel everything."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits has it

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error(self._what, error=repr(error))
