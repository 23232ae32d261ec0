"""What a call returns before its answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class PacelineFuture(Generic[T]):
    """The answer to come of a call that is under way. Use it from any thread (`result`) or event loop (`await`).

    A command of a training run cannot be cancelled: it has its place in the run's order, and those after it wait for
    it. A task that is cancelled while it awaits one leaves the command to its end.
    """

    def __init__(self, future: Future[T], *, cancellable: bool = True) -> None:
        self._future = future
        self._cancellable = cancellable

    def result(self, timeout: float | None = None) -> T:
        """Block until the answer is there and return it, or raise the call's error.

        Raises TimeoutError after `timeout` seconds (None waits without end); the call goes on. Inside an event loop
        use `await`, which does not block it.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the call, also on the server; return False if it has ended or is a training command."""
        return self._cancellable and self._future.cancel()

    def add_done_callback(self, callback: Callable[[PacelineFuture[T]], object]) -> None:
        """Have `callback` called with this future when the call has ended, on the client's thread. Must not block."""
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        waiter = asyncio.wrap_future(self._future)
        return (waiter if self._cancellable else asyncio.shield(waiter)).__await__()


def awaitable(method: Callable[P, PacelineFuture[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make the `_async` twin of a method that returns a future: a coroutine function that returns the answer itself."""

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await method(*args, **kwargs)

    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__}_async"
    return twin
