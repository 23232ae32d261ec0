"""A run's commands: sent in the order in which they are issued, and followed until they have ended."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from copy import copy
from enum import Enum
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import grpc

from paceline import errors
from paceline.client.futures import CommandOrder, IssuedCommand, PacelineFuture
from paceline.client.retry import call_name, is_retryable
from paceline.client.transport import Metadata, Transport, read
from paceline.codec.commands import Command, execute_request, may_have_arrived, reply_in
from paceline.errors import Fate
from paceline.spans import span
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CommandState

MAX_COMMANDS_UNANSWERED = 32
"""Maximum number of commands of one run in flight. More would only wait at the server."""

WAIT_NOTICE_SECONDS = 5.0
"""How long a command may wait for its answer before the log says what is ahead of it."""

_ATTACH_AGAIN = (
    "attach again with ServiceClient.get_training_client({!r}), see how far the run is, and issue again what is missing"
)
_log = logging.getLogger("paceline")
Reply = TypeVar("Reply")
P = ParamSpec("P")
T = TypeVar("T")
Outcome: TypeAlias = Reply | BaseException


class Link(Enum):
    """What the client knows of its way to the trainer, from the last command that it sent."""

    OPEN = "it was accepted, or turned away for a reason of its own"
    SHUT = "it was turned away for as long as calls are repeated, and another would be too"
    IN_DOUBT = "the connection was lost, so it may have arrived"


class CommandSender:
    """Sends the commands of one run, in the order in which they are issued, and follows each until it has ended.

    A command gets its seq_id when it is sent, and the next one is sent once the trainer has it. So one that is turned
    away leaves its seq_id to the next, and there are no gaps. `sending` gives each its turn, in order, and blocks all
    later ones: loading a checkpoint until it is answered, a custom loss until its second half is sent.

    `Link` is what is known of the way to the trainer, and only `_move` changes it. If a command cannot be brought
    there, those that were issued until then end as it does, and are not sent, since each would wait for as long. One
    that is issued later is sent. But if the earlier one may have arrived, the trainer is asked first; if it has not,
    the later one is not sent either: it must not execute without its caller's decision on the one that is missing.
    """

    def __init__(self, transport: Transport, run_id: str, last_seq_id: int, attachment: int) -> None:
        """Send commands after `last_seq_id`; `attachment` is the client's number from AttachRun."""
        self._turn = asyncio.Lock()
        self._transport = transport
        self._run_id = run_id
        self._attachment = attachment
        self._next = last_seq_id + 1
        """Seq_id of the next command, or of the one in doubt."""
        self._link = Link.OPEN
        self._failure: errors.PacelineError | None = None
        """Why the link is SHUT or IN_DOUBT; None while it is OPEN."""
        self._failed_before = 0
        """Commands with lower numbers had been issued when it became so, and end so too."""
        self.order = CommandOrder()
        """Identifies the order of the commands that are issued here."""
        self.newest_partial_pass: IssuedCommand | None = None
        """The pass that was sent last of those of which the trainer has not accepted every part."""
        self._issuing = threading.Lock()
        self._issued = self._next
        """Number of the next command that is issued: its seq_id, unless one before it is turned away."""
        self._in_flight = asyncio.Semaphore(MAX_COMMANDS_UNANSWERED)
        self._deadlines: set[asyncio.Timeout] = set()
        """Those of the commands in flight."""
        self._told_until = 0
        """Commands with lower numbers had been sent when the log last said what they wait for."""
        self._wait_level = logging.WARNING
        """Of the first such notice; later ones are no news."""

    def issue(
        self, name: str, count: int, work: Callable[[IssuedCommand], Coroutine[Any, Any, T]], *, is_pass: bool = False
    ) -> PacelineFuture[T]:
        """Start `work`, which sends `count` commands at its place in the order. `name` identifies it in the log."""
        with self._issuing:
            first, last = self._issued, self._issued + count - 1
            issued = IssuedCommand(
                f"{name} {span(first, last, '')} of {self._run_id}", self.order, first, count, is_pass
            )
            future = self._transport.submit_command(issued, _with_fate(work, issued))
            self._issued += count
        return future

    def put(
        self,
        requests: list[Any],
        decode: Callable[[Sequence[Outcome[Any]]], T],
        *,
        barrier: bool = False,
        complete: Callable[[], None] | None = None,
    ) -> PacelineFuture[T]:
        """Issue commands that belong together. `decode` gets the reply or error of each, in order.

        With `barrier`, later commands are not sent until these are answered. `complete` is called when all commands
        before have been sent: it fills in what depends on them, or raises why these are not to be sent.
        """

        async def work(issued: IssuedCommand) -> T:
            async with self.sending(issued):
                if complete is not None:
                    complete()
                answers = await self.send(issued, requests)
                if barrier:
                    await asyncio.wait(answers)
            return decode(await outcomes(answers))

        is_pass = isinstance(requests[0], pb.ForwardBackwardRequest)
        return self.issue(call_name(requests[0]), len(requests), work, is_pass=is_pass)

    def put_one(self, request: Command, decode: Callable[[Any], T], *, barrier: bool = False) -> PacelineFuture[T]:
        """Issue a single command, like `put`. `decode` gets its reply; its error is raised."""

        def decode_one(replies: Sequence[Outcome[Any]]) -> T:
            (reply,) = replies
            if isinstance(reply, BaseException):
                raise reply
            return decode(reply)

        return self.put([request], decode_one, barrier=barrier)

    @asynccontextmanager
    async def sending(self, issued: IssuedCommand) -> AsyncIterator[None]:
        """Wait for a command's turn to be sent, and have it until the block ends."""
        async with self._turn:
            try:
                yield
            finally:
                if issued.is_pass and len(issued.seq_ids) < issued.count:
                    self.newest_partial_pass = issued

    async def send(self, issued: IssuedCommand, requests: list[Any]) -> list[asyncio.Task[Any]]:
        """Send commands that belong together; return the tasks of their answers. Only within `sending`.

        Takes them out of the list, since they may be large. Once one is turned away, those after it are not sent.
        """
        answers: list[asyncio.Task[Any]] = []
        refusal: errors.PacelineError | None = None
        while requests:
            request = requests.pop(0)
            if refusal is not None:
                refusal = _unsent(refusal)
                answers.append(self._transport.start_task(_raise(refusal)))
                continue
            await self._in_flight.acquire()
            try:
                await self._check_link(issued)
                status = await self._deliver(request)
                if not status.is_another:
                    issued.seq_ids.append(status.seq_id)
                answer = self._answer(status)
            except errors.PacelineError as error:
                self._in_flight.release()
                error.fate = error.fate or Fate.TURNED_AWAY
                refusal = error
                answer = _raise(error)
            answers.append(self._transport.start_task(answer))
        return answers

    async def _check_link(self, issued: IssuedCommand) -> None:
        """Open the link for a command that may be sent. Otherwise raises why not."""
        if self._failure is not None and issued.number < self._failed_before:
            raise _unsent(self._failure)
        if self._link is Link.IN_DOUBT and not await self._has_arrived():
            # The link stays as it is: the command may be on its way for as long as its connection lives.
            raise self._passed_over()
        self._move(Link.OPEN)

    async def _has_arrived(self) -> bool:
        """Return whether the command in doubt has arrived."""
        request = pb.FollowRequest(run_id=self._run_id, seq_ids=[self._next], max_seconds=0)
        try:
            reply = await self._transport.call(_first_of(self._transport.trainer.Follow), request, "training")
        except errors.PacelineError as error:
            self._move(Link.IN_DOUBT, error)
            raise
        return CommandState(reply.status.state) is not CommandState.NOT_ARRIVED

    def _passed_over(self) -> errors.SeqIdGap:
        return errors.SeqIdGap(
            f"command {self._next} before it has not arrived, so this one was not sent; {self._attach_again}",
            field="seq_id",
            metadata={"missing": str(self._next)},
        )

    @property
    def _attach_again(self) -> str:
        """What a caller does when it is not known what has executed."""
        return _ATTACH_AGAIN.format(self._run_id)

    def _move(self, link: Link, failure: errors.PacelineError | None = None) -> None:
        """Move the link, which nothing else does. `failure` is why it is SHUT or IN_DOUBT.

        OPEN to SHUT: the trainer was full or could not be reached for as long as calls are repeated.
        OPEN to IN_DOUBT: an attempt ended so that the command may have arrived.
        SHUT to OPEN: a command is tried that was issued afterwards.
        IN_DOUBT to OPEN: the command has arrived after all.
        IN_DOUBT to IN_DOUBT: the trainer could not be asked whether it has.
        """
        if self._link is Link.IN_DOUBT and link is Link.OPEN:
            self._next += 1  # the seq_id is that of the command which has arrived
        self._link = link
        # Without its traceback, which would keep the command's request.
        self._failure = copy(failure)
        self._failed_before = self._issued

    async def _deliver(self, request: Command) -> pb.CommandStatus:
        """Have the trainer take a command under the next seq_id; return its first status.

        Raises the error of the call if the command was turned away, or is in doubt. Each attempt may end so that the
        command may have arrived. The last one's error says nothing of those before: if it is a refusal, as of a full
        trainer, the command may still be there from an earlier one.
        """
        execute = execute_request(request, self._run_id, self._next, self._attachment)
        first = _first_of(self._transport.trainer.Execute)
        doubt: errors.PacelineError | None = None
        """Of the last attempt that may have arrived."""

        async def attempt(execute: pb.ExecuteRequest, **options: Any) -> pb.ExecuteResponse:
            nonlocal doubt
            try:
                return await first(execute, **options)
            except grpc.aio.AioRpcError as failure:
                if may_have_arrived(error := self._transport.error(failure, execute, "training")):
                    doubt = error
                raise

        try:
            reply = await self._transport.call(attempt, execute, "training")
        except errors.PacelineError as error:
            if doubt is not None:
                if not may_have_arrived(error):
                    doubt.add_note(f"It was sent again, and turned away: {error}")
                    error = doubt
                error.fate = Fate.UNKNOWN
                self._move(Link.IN_DOUBT, error)  # without what follows, which is not true of those that are not sent
                _add(error, f"command {self._next} may have executed: {self._attach_again}")
                raise error from None
            if is_retryable(error):  # and was retried in vain; other refusals concern this command alone
                self._move(Link.SHUT, error)
            raise
        self._next += 1
        return reply.status

    async def _answer(self, status: pb.CommandStatus) -> Any:
        """Follow a command until it has ended, and return its reply or raise its error."""
        seq_id = status.seq_id
        request = pb.FollowRequest(run_id=self._run_id, seq_ids=[seq_id])
        notice = asyncio.get_running_loop().call_later(WAIT_NOTICE_SECONDS, self._notice_wait, seq_id)
        try:
            while not CommandState(status.state).has_ended:
                status = await self._transport.call(self._follow, request, "training")
                if not CommandState(status.state).has_ended:  # the stream broke, as the next one may
                    await asyncio.sleep(self._transport.connection.retry.first_delay)
        except errors.PacelineError as error:
            raise self._unread(error, seq_id) from error
        finally:
            notice.cancel()
            self._in_flight.release()
        until = asyncio.get_running_loop().time() + self._transport.timeouts.training
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(until)
        return reply_in(status)

    def _notice_wait(self, seq_id: int) -> None:
        """Say what a command waits for, unless that was said of one that had been sent before it."""
        if seq_id >= self._told_until:
            self._told_until = self._next
            self._transport.start_task(self._tell_wait(seq_id))

    async def _tell_wait(self, seq_id: int) -> None:
        request = pb.FollowRequest(run_id=self._run_id, seq_ids=[seq_id], max_seconds=0)
        try:
            reply = await self._transport.call(_first_of(self._transport.trainer.Follow), request, "query")
        except errors.PacelineError:
            return  # whoever waits for the command is told
        if CommandState(reply.status.state).has_ended:
            return
        message = "command %d of %s: no answer after %g s; %s"
        _log.log(self._wait_level, message, seq_id, self._run_id, WAIT_NOTICE_SECONDS, _ahead_of(reply.status))
        self._wait_level = logging.INFO

    def _unread(self, error: errors.PacelineError, seq_id: int) -> errors.PacelineError:
        """Return the error of a command that the trainer has, and of which no more could be learnt."""
        if not isinstance(error, (errors.Unavailable, errors.TimedOut, errors.Cancelled, errors.RunNotFound)):
            # For example Denied, which of a command would mean that it was turned away.
            error = errors.UpstreamUnavailable(f"the answer of command {seq_id} cannot be read: {error}")
        _add(error, f"the trainer has command {seq_id} and executes it in its place: {self._attach_again}")
        error.fate = Fate.UNKNOWN
        return error

    async def _follow(
        self,
        request: pb.FollowRequest,
        *,
        timeout: float,  # noqa: ASYNC109 - as the stub's method calls it
        metadata: Metadata,
    ) -> pb.CommandStatus:
        """Read a stream of statuses until it ends or breaks; return the last one. Raises AioRpcError if it has none.

        Raises TimedOut if for `timeout` seconds no command of the run is answered. A deadline of gRPC's would also run
        while the command waits for those before it, which may be slow.
        """
        status: pb.CommandStatus | None = None
        stream = self._transport.trainer.Follow(request, metadata=metadata)
        deadline = asyncio.timeout(timeout)
        self._deadlines.add(deadline)
        try:
            async with deadline:
                while (reply := await read(stream)) is not None:
                    status = reply.status
        except grpc.aio.AioRpcError:
            if status is None:
                raise
        except TimeoutError:
            raise errors.TimedOut(
                f"neither this command nor one before it was answered within {timeout:g} s (Timeouts.training); give "
                "ServiceClient(timeouts=Timeouts(training=...)) a longer one"
            ) from None
        finally:
            self._deadlines.discard(deadline)
            stream.cancel()
        if status is None:
            raise _silent()
        return status


def _ahead_of(status: pb.CommandStatus) -> str:
    """Return what has to end before a command that has not ended does."""
    if status.missing_seq_id:
        return f"command {status.missing_seq_id}, which has to be before it, has not arrived"
    if status.commands_ahead:
        return f"{status.commands_ahead} command(s) of this run are ahead of it"
    if status.executing_seconds:
        return (
            f"none of this run is ahead of it, and the trainer has had it in work for {status.executing_seconds:.0f} "
            "s: its own batch, and those of other runs that came before"
        )
    return "none of this run is ahead of it: the trainer works for other runs"


def command(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method that issues commands, whose errors say that nothing was sent."""

    @wraps(method)
    def issue(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except errors.PacelineError as error:
            error.fate = Fate.TURNED_AWAY
            raise

    return issue


async def outcomes(answers: Sequence[asyncio.Task[Any]]) -> Sequence[Outcome[Any]]:
    """Wait for answers and return the reply or error of each, in order."""
    found: list[Outcome[Any]] = await asyncio.gather(*answers, return_exceptions=True)
    return found


def _first_of(method: grpc.aio.UnaryStreamMultiCallable[Any, Reply]) -> Callable[..., Coroutine[Any, Any, Reply]]:
    """Return a coroutine function that calls a method and returns the first message of the stream."""

    async def call(request: Any, **options: Any) -> Reply:
        stream = method(request, **options)
        try:
            message = await read(stream)
        finally:
            stream.cancel()
        if message is None:
            raise _silent()
        return message

    return call


async def _with_fate(work: Callable[[IssuedCommand], Coroutine[Any, Any, T]], issued: IssuedCommand) -> T:
    try:
        return await work(issued)
    except errors.PacelineError as error:
        error.fate = error.fate or Fate.UNKNOWN  # that of a reply which cannot be read
        raise


def _unsent(cause: errors.PacelineError) -> errors.PacelineError:
    """Return the error of a command that was not sent because of the error of one before it.

    Each gets its own: the traceback of a shared one would keep the requests of all these commands.
    """
    error = copy(cause)
    error.__notes__ = ["The command was not sent: one before it ended so."]
    error.fate = Fate.TURNED_AWAY
    return error


def _add(error: errors.PacelineError, remedy: str) -> None:
    error.message = f"{error.message}; {remedy}"
    error.args = (error.message,)


def _silent() -> grpc.aio.AioRpcError:
    """Return the error of a stream that ended without a status, which no trainer's does."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "a stream of statuses ended without one")


async def _raise(error: errors.PacelineError) -> NoReturn:
    raise error
