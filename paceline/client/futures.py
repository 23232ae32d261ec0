"""Futures of calls, and the commands of a client that are still to be answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from paceline import errors
from paceline.client.loop_thread import OWNER, check_may_wait

T = TypeVar("T")

FIRST_NOTICE_SECONDS, _NOTICE_SECONDS = 1.0, 5.0
"""Until a closing client first logs what it waits for, and between repetitions."""
_SUPERSEDED = (errors.ClientSuperseded, errors.CommandCancelled)
"""What commands end in after another client has attached to their run."""
_MAX_NAMED = 5
"""Number of commands that a notice names; the rest are counted."""
_log = logging.getLogger("paceline")


class PacelineFuture(Generic[T]):
    """A handle to the answer of a call in flight. Use it from any thread (`result`) or event loop (`await`).

    A training command cannot be cancelled: it has a place in the run's order, and later commands wait for it.
    Cancelling a task that awaits it does not stop the command. If a command fails and its answer is never retrieved,
    by `result`, `await` or a callback, the error is logged (logger "paceline").
    """

    def __init__(self, future: Future[T], command: IssuedCommand | None = None) -> None:
        self._future = future
        self._command = command

    def result(self, timeout: float | None = None) -> T:
        """Block until the call has ended, then return its answer or raise its error.

        Inside an event loop use `await`, which does not block it. Raises TimeoutError after `timeout` seconds (None
        waits indefinitely); the call continues. A wait that could never end raises at once: Forked in a process that
        was forked before the answer arrived, Unsupported in a callback, or in a custom loss for a command after it.
        """
        if not self._future.done():
            check_may_wait()
            self._check_is_not_held()
        try:
            self._future.exception(timeout)  # returns the call's own error, so that what it raises is no answer
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s; the call goes on") from None
        self._retrieve()
        return self._future.result()

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - as in `result`
        """Like `await` on this future; raises TimeoutError after `timeout` seconds, and the call continues."""
        if not self._future.done():
            OWNER.check()
            self._check_is_not_held()
            waiter = asyncio.wrap_future(self._future)
            waiter.add_done_callback(_retrieve)
            try:
                await asyncio.wait({waiter}, timeout=timeout)
            except asyncio.CancelledError:
                self.cancel()
                raise
            if not self._future.done():
                raise TimeoutError(f"no answer within {timeout:g} s; the call goes on")
        return await self

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the call, on the server too; return False if it has ended or is a training command.

        As with Python's own futures, `result` then raises concurrent.futures.CancelledError, and cancelling again
        returns True.
        """
        return self._command is None and self._future.cancel()

    def add_done_callback(self, callback: Callable[[PacelineFuture[T]], object]) -> None:
        """Call `callback` with this future when the call has ended, on the thread of all clients of the process.

        It must not block: meanwhile no client gets an answer. What it raises is logged, also SystemExit.
        """

        def call(_: Future[T]) -> None:
            self._retrieve()
            try:
                callback(self)
            except BaseException:  # SystemExit would end the thread, and every later call would wait forever
                _log.exception("a callback of a future failed")

        self._future.add_done_callback(call)

    def __repr__(self) -> str:
        state = "done" if self._future.done() else "pending"
        return f"<{type(self).__name__} {state}{f': {self._command.name}' if self._command else ''}>"

    def __await__(self) -> Generator[Any, None, T]:
        if not self._future.done():
            OWNER.check()
            self._check_is_not_held()
        waiter = asyncio.wrap_future(self._future)
        if self._command is None:
            return (yield from waiter)
        waiter.add_done_callback(_retrieve)
        try:
            return (yield from asyncio.shield(waiter))
        except Exception:  # the command's; a task that stops waiting gets CancelledError, which is no Exception
            self._retrieve()
            raise

    if not TYPE_CHECKING:  # to a type checker, every attribute would exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else "; call .result() or await it for the answer"
            message = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(message, name=name, obj=self)

    def __del__(self) -> None:
        if (command := self._command) is not None:  # this was the last reference, so the answer cannot be retrieved
            self._future.add_done_callback(lambda _: command.log_unretrieved_failure())

    def __reduce__(self) -> NoReturn:
        raise errors.Unsupported("a future cannot be pickled; send its result()")

    def _check_is_not_held(self) -> None:
        if self._command is not None:
            self._command.check_is_not_held()

    def _retrieve(self) -> None:
        """Note that the answer of a call that has ended is delivered."""
        if self._command is not None:
            self._command.retrieve(self._future.exception())


def command_of(future: object) -> IssuedCommand | None:
    """Return the command whose answer a future is; None for other futures, and for anything else."""
    return future._command if isinstance(future, PacelineFuture) else None  # noqa: SLF001


def _retrieve(waiter: asyncio.Future[Any]) -> None:
    """Take the error out of a future that nobody may await any more, or asyncio would log it too, without its name."""
    if not waiter.cancelled():
        waiter.exception()


@dataclass(eq=False, slots=True)
class Hold:
    """A user's function that runs as part of a command, and before later commands of its run are sent."""

    command: IssuedCommand
    is_over: bool = False


HOLD: ContextVar[Hold | None] = ContextVar("hold", default=None)
"""The hold of the function that is running; None outside such functions."""


@dataclass(eq=False, slots=True)
class CommandOrder:
    """The order of the commands that one client issues for a run."""

    is_superseded: bool = False
    """Whether the caller has been told that another client trains the run."""


@dataclass(eq=False, slots=True)
class IssuedCommand:
    """An issued command, or several that belong together."""

    name: str
    """RPC, run and numbers, for the log."""
    order: CommandOrder
    number: int
    """Its place in the order; that of the first of several."""
    count: int = 1
    """How many belong together."""
    is_pass: bool = False
    """Whether they are of ForwardBackward."""
    seq_ids: list[int] = field(default_factory=list)
    """Those of the commands that the trainer has accepted."""
    failure: str | None = None
    """The text of the error with which the command ended.

    Not the error itself: its traceback holds the transport, which would outlive the clients that were dropped.
    """
    is_superseded: bool = False
    """Whether it failed because another client attached to the run, as all commands after it do."""
    is_retrieved: bool = False
    """Whether the error was delivered to a caller, or logged."""

    def end(self, future: Future[Any]) -> None:
        """Record how the command ended."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self.failure = str(error)
            self.is_superseded = isinstance(error, _SUPERSEDED)

    def retrieve(self, error: BaseException | None) -> None:
        """Record that the answer, or this error, was delivered to a caller."""
        self.is_retrieved = True
        if isinstance(error, _SUPERSEDED):
            self.order.is_superseded = True

    def check_is_not_held(self) -> None:
        """Raise Unsupported in a function for which the command waits: neither would ever end."""
        hold = HOLD.get()
        if hold is None or hold.is_over or hold.command.order is not self.order:
            return
        if self.number >= hold.command.number:
            raise errors.Unsupported(
                f"{self.name} ends after this loss_fn has returned, so loss_fn cannot wait for it; issue what loss_fn "
                "needs before forward_backward_custom, and wait for the rest after it"
            )

    def log_unretrieved_failure(self, *, is_last: bool = False) -> None:
        """Log the error if the command failed and its answer was never retrieved.

        That another client trains the run is logged once, when the client closes (`is_last`), and only if no answer
        has told it: the other commands cannot have answers.
        """
        if self.failure is None or self.is_retrieved:
            return
        if self.is_superseded and not is_last:
            return
        self.is_retrieved = True
        if not self.is_superseded or not self.order.is_superseded:
            self.order.is_superseded |= self.is_superseded
            _log.error("%s failed, and its answer was never retrieved: %s", self.name, self.failure)


class UnansweredCommands:
    """The commands of one client that are unanswered, or failed without their answer being retrieved."""

    def __init__(self) -> None:
        self._pending: dict[int, IssuedCommand] = {}
        self._failed: list[IssuedCommand] = []
        self._change = asyncio.Event()
        self._is_closed = False

    def add(self, issued: IssuedCommand, future: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Track a command."""
        self._pending[id(issued)] = issued
        future.add_done_callback(lambda ended: self._end(issued, ended, loop))

    async def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until every command is answered, and log what is being waited for."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + (0 if self._is_closed else seconds)
        notice = clock() + FIRST_NOTICE_SECONDS
        while self._pending and (now := clock()) < deadline:
            if now >= notice:
                message = "the client is closing: waiting up to %.0f s more for %s (Ctrl-C stops waiting)"
                _log.warning(message, deadline - now, self._describe())
                notice = now + _NOTICE_SECONDS
            self._change.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), min(notice, deadline) - now)

    def close(self) -> None:
        """Log the commands left unanswered and unreported failures; later `wait` calls do not wait."""
        if not self._is_closed and self._pending:
            message = "the client ended without answers to %s: those that the trainer had not accepted are lost"
            _log.error(message, self._describe())
        self._is_closed = True
        for issued in self._pending.values():
            issued.is_retrieved = True
        for issued in self._failed:
            issued.log_unretrieved_failure(is_last=True)

    def _end(self, issued: IssuedCommand, future: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        issued.end(future)
        del self._pending[id(issued)]
        self._failed = [one for one in self._failed if not one.is_retrieved]
        if issued.failure is not None and not issued.is_retrieved and not self._is_told(issued):
            self._failed.append(issued)
        loop.call_soon_threadsafe(self._change.set)

    def _is_told(self, issued: IssuedCommand) -> bool:
        """Return whether this failure says only what another one of its order does."""
        return issued.is_superseded and any(one.is_superseded and one.order is issued.order for one in self._failed)

    def _describe(self) -> str:
        pending = list(self._pending.values())
        named = ", ".join(issued.name for issued in pending[:_MAX_NAMED])
        return f"{len(pending)} command(s): {named}{', ...' if len(pending) > _MAX_NAMED else ''}"
