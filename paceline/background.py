"""Background tasks that run whether or not a caller waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from paceline.log import get_logger

T = TypeVar("T")
P = ParamSpec("P")

_log = get_logger(__name__)


class Background:
    """A group of background tasks."""

    def __init__(self, what: str) -> None:
        """Log failures as `what`."""
        self._what = what
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a task whose error is logged. A caller that awaits it must shield it: cancelling would end the task."""
        return self._create(work, self._ended)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task whose result or error the caller awaits, or no longer needs."""
        return self._create(work, self._answered)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work, which runs to its end even if the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    async def finish(self) -> None:
        """Wait until all tasks have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    def _create(self, work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a waiting caller raises it; without one, asyncio must not log it as never retrieved

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error(self._what, error=repr(error))


class _Changing(Protocol):
    """An object whose changes continue when the caller is cancelled."""

    _changes: Background


Owner = TypeVar("Owner", bound=_Changing)


def uninterrupted(
    method: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]]:
    """Make a method run to its end in `self._changes` even if the caller is cancelled."""

    @wraps(method)
    async def run(self: Owner, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await self._changes.run(method(self, *arguments, **options))

    return run
