"""A thread that is started in advance and runs one function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Worker:
    """Runs one function outside the event loop.

    Its thread starts immediately, because no thread can be started once the main thread has ended (Python 3.12), when
    previously issued commands may still be running. It is a daemon thread and does not keep the process alive.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="paceline-worker", daemon=True).start()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run the function and return its result or raise its error. May be called once."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                _settle(future, function, arguments)

        self._work.put(work)
        return await asyncio.wrap_future(future)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        if (work := self._work.get()) is not None:
            work()


def _settle(future: Future[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
