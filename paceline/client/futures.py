"""What a call returns before its answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import wraps
from inspect import signature
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from paceline import errors
from paceline.client.outstanding import Issued

T = TypeVar("T")
P = ParamSpec("P")


class PacelineFuture(Generic[T]):
    """The answer to come of a call that is under way. Use it from any thread (`result`) or event loop (`await`).

    A command of a training run cannot be cancelled: it has its place in the run's order, and those after it wait for
    it. A task that is cancelled while it awaits one leaves the command to its end. A command that fails and whose
    answer nobody asks for is told in the log (logger "paceline").
    """

    def __init__(self, future: Future[T], command: Issued | None = None) -> None:
        self._future = future
        self._command = command

    def result(self, timeout: float | None = None) -> T:
        """Block until the answer is there and return it, or raise the call's error.

        Raises TimeoutError after `timeout` seconds (None waits without end); the call goes on. Inside an event loop
        use `await`, which does not block it.
        """
        self._ask()
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the call, also on the server; return False if it has ended or is a training command."""
        return self._command is None and self._future.cancel()

    def add_done_callback(self, callback: Callable[[PacelineFuture[T]], object]) -> None:
        """Have `callback` called with this future when the call has ended, on the client's thread. Must not block."""
        self._ask()
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        self._ask()
        waiter = asyncio.wrap_future(self._future)
        return (waiter if self._command is None else asyncio.shield(waiter)).__await__()

    def __del__(self) -> None:
        if self._command is not None:
            self._command.drop()

    def __reduce__(self) -> NoReturn:
        raise errors.Unsupported("an answer to come cannot be sent to another process; send its result()")

    def _ask(self) -> None:
        if self._command is not None:
            self._command.ask()


def awaitable(method: Callable[P, PacelineFuture[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make the `_async` twin of a method that returns a future: a coroutine function that returns the answer itself."""

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await method(*args, **kwargs)

    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__}_async"
    # `help` shows what `await` gives.
    answer = str(method.__annotations__["return"]).removeprefix("PacelineFuture[").removesuffix("]")
    twin.__annotations__ = {**method.__annotations__, "return": answer}
    del twin.__dict__["__wrapped__"]
    twin.__signature__ = signature(method).replace(return_annotation=answer)  # type: ignore[attr-defined]
    return twin
