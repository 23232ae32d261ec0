"""Futures of calls."""

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
    """A handle to the answer of a call in flight. Use it from any thread (`result`) or event loop (`await`).

    A training command cannot be cancelled: it has a place in the run's order, and later commands wait for it.
    Cancelling a task that awaits it does not stop the command. If a command fails and its answer is never retrieved,
    the error is logged (logger "paceline").
    """

    def __init__(self, future: Future[T], command: Issued | None = None) -> None:
        self._future = future
        self._command = command

    def result(self, timeout: float | None = None) -> T:
        """Block until the call has ended, then return its answer or raise its error.

        Raises TimeoutError after `timeout` seconds (None waits indefinitely); the call continues. Inside an event loop
        use `await`, which does not block it.
        """
        self._ask()
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the call, on the server too; return False if it has ended or is a training command."""
        return self._command is None and self._future.cancel()

    def add_done_callback(self, callback: Callable[[PacelineFuture[T]], object]) -> None:
        """Call `callback` with this future when the call has ended, on the client's thread. It must not block."""
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
    """Return the `_async` twin of a method that returns a future: a coroutine function that returns the answer."""

    @wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await method(*args, **kwargs)

    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__}_async"
    # So that `help` shows the type that `await` returns.
    answer = str(method.__annotations__["return"]).removeprefix("PacelineFuture[").removesuffix("]")
    twin.__annotations__ = {**method.__annotations__, "return": answer}
    del twin.__dict__["__wrapped__"]
    twin.__signature__ = signature(method).replace(return_annotation=answer)  # type: ignore[attr-defined]
    return twin
