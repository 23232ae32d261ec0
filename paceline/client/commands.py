"""A run's commands: numbered when they are issued and sent in that order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc

from paceline import errors
from paceline.client.futures import PacelineFuture, Place
from paceline.client.retry import call_name, is_unread
from paceline.client.transport import Metadata, Transport
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb

MAX_COMMANDS_UNANSWERED = 32
"""Maximum number of commands of one run in flight. More would only wait at the server."""


class Command(Protocol):
    """A request with a place in a run's order."""

    seq_id: int
    attachment: int


Request = TypeVar("Request", bound=Command)
Reply = TypeVar("Reply")
T = TypeVar("T")
Outcome: TypeAlias = Reply | BaseException


class CommandQueue:
    """Numbers the commands of one run without gaps and sends them in that order without waiting for their answers.

    A command is numbered under a lock when it is issued, and its task starts in the same order. `turn`, a fair lock,
    preserves that order while commands wait for the limit on commands in flight. The holder of `turn` blocks all later
    commands: loading a checkpoint holds it until it is answered, a custom loss until its second half is sent.

    A command that was certainly not accepted, because the service did not read it or turned it away, leaves its seq_id
    free, and later commands would wait for it. It is used up by an empty command, which is refused and changes nothing:
    at once or, if that is turned away too, before the next command is sent. A command that may have arrived leaves a
    gap if it did not: what follows it must not execute without its caller's decision.
    """

    def __init__(self, transport: Transport, run_id: str, last_seq_id: int, attachment: int) -> None:
        """Create the queue for the commands after `last_seq_id`; `attachment` is the client's number from AttachRun."""
        self._run_id = run_id
        self._order = object()
        self.turn = asyncio.Lock()
        self._attachment = attachment
        self._transport = transport
        self._numbering = threading.Lock()
        self._next = last_seq_id + 1
        self._in_flight = asyncio.Semaphore(MAX_COMMANDS_UNANSWERED)
        self._deadlines: dict[asyncio.Timeout, int] = {}
        """Those of the commands in flight, with their seq_ids."""
        self._doubts: dict[int, errors.PacelineError] = {}
        """The last error after which a command in flight may have arrived, by seq_id."""
        self._free: set[int] = set()
        """Seq_ids to use up."""
        self._gaps: dict[int, int] = {}
        """Commands refused because an earlier one had not arrived, and its seq_id. Once it is free, or answered, they
        are free."""
        self._filling: asyncio.Task[errors.PacelineError | None] | None = None
        self._failure: errors.PacelineError | None = None
        """Why free seq_ids could not be used up when that was last tried for a command."""
        self._failed_before = 0
        """Commands before this one had been issued by then, and end with the same error."""

    def issue(self, name: str, count: int, work: Callable[[range], Coroutine[Any, Any, T]]) -> PacelineFuture[T]:
        """Reserve the next `count` seq_ids for `work`, which must use all of them, and start it.

        `name` identifies it in the log.
        """
        with self._numbering:
            seq_ids = range(self._next, self._next + count)
            numbers = f"{seq_ids[0]}" if count == 1 else f"{seq_ids[0]} to {seq_ids[-1]}"
            named = f"{name} {numbers} of {self._run_id}"
            future = self._transport.submit_command(named, self.place(seq_ids), work(seq_ids))
            self._next += count
        return future

    def place(self, seq_ids: range) -> Place:
        """Return the place of the commands with these seq_ids, which belong together."""
        return Place(self._order, seq_ids[0])

    def put(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
        requests: Sequence[Request],
        decode: Callable[[Sequence[Outcome[Reply]]], T],
        *,
        barrier: bool = False,
    ) -> PacelineFuture[T]:
        """Issue commands that belong together. `decode` gets the reply or error of each, in order.

        With `barrier`, later commands are not sent until these are answered.
        """

        async def work(seq_ids: range) -> T:
            async with self.turn:
                calls = await self.send(method, requests, seq_ids)
                if barrier:
                    await asyncio.wait(calls)
            return decode(await outcomes(calls))

        return self.issue(call_name(requests[0]), len(requests), work)

    def put_one(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
        request: Request,
        decode: Callable[[Reply], T],
        *,
        barrier: bool = False,
    ) -> PacelineFuture[T]:
        """Issue a single command, like `put`. `decode` gets its reply; its error is raised."""

        def decode_one(replies: Sequence[Outcome[Reply]]) -> T:
            (reply,) = replies
            if isinstance(reply, BaseException):
                raise reply
            return decode(reply)

        return self.put(method, [request], decode_one, barrier=barrier)

    async def send(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply], requests: Sequence[Request], seq_ids: range
    ) -> list[asyncio.Task[Reply]]:
        """Start the calls of requests with these seq_ids. Only for the holder of `turn`.

        Raises the error because of which the seq_id of an earlier command could not be used up; nothing is sent then.
        """
        if self._failure is None or seq_ids[0] >= self._failed_before:
            self._failure, self._failed_before = await self._use_up(), self._next
        if self._failure is not None:
            self._set_free(seq_ids)
            # One error for each: the traceback of a shared one would keep the requests of all these commands.
            error = copy(self._failure)
            error.__notes__ = list(self._failure.__notes__)
            raise error
        calls = []
        for request, seq_id in zip(requests, seq_ids, strict=True):
            request.seq_id, request.attachment = seq_id, self._attachment
            await self._in_flight.acquire()
            answer = await self._transport.start(partial(self._attempt, method), request, "training")
            call = self._transport.start_task(self._counted(answer, seq_id))
            call.add_done_callback(lambda _: self._in_flight.release())
            calls.append(call)
        return calls

    def give_back(self, seq_ids: Iterable[int]) -> None:
        """Have seq_ids used up with which nothing was executed. Commands that were sent may be waiting for them."""
        self._set_free(seq_ids)
        self._start_filling()

    async def _use_up(self) -> errors.PacelineError | None:
        """Use up free seq_ids, in order; return the error of the first that cannot be. It and those after it stay."""
        return await asyncio.shield(self._start_filling()) if self._free else None

    def _start_filling(self) -> asyncio.Task[errors.PacelineError | None]:
        if self._filling is None or self._filling.done():
            self._filling = self._transport.start_task(self._fill_all())
        return self._filling

    async def _fill_all(self) -> errors.PacelineError | None:
        while self._free:
            seq_id = min(self._free)
            if (error := await self._fill(seq_id)) is not None:
                error.was_sent = False  # a copy of it is raised for each command behind this one
                error.add_note(f"The command was not sent, because seq_id {seq_id} before it could not be used up.")
                return error
        return None

    def _set_free(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._free.add(seq_id)
            self._free_those_behind(seq_id)

    def _free_those_behind(self, missing: int) -> None:
        """Free the commands that were refused because a command had not arrived, which is free or answered by now."""
        behind = [seq_id for seq_id, earlier in self._gaps.items() if earlier == missing]
        self._free.update(behind)
        for seq_id in behind:
            del self._gaps[seq_id]

    async def _fill(self, seq_id: int) -> errors.PacelineError | None:
        """Use up a free seq_id; return the error if it may still be free. The same call again is without effect."""
        empty = pb.ForwardBackwardRequest(run_id=self._run_id, seq_id=seq_id, attachment=self._attachment)
        transport = self._transport
        try:
            await transport.call_beside(transport.trainer.ForwardBackward, empty, "training")
        except errors.PacelineError as error:
            is_free = errors.is_not_accepted(error) or is_unread(error) or isinstance(error, errors.SeqIdGap)
            if is_free or errors.is_outcome_unknown(error):
                return error
        self._free.discard(seq_id)
        self._free_those_behind(seq_id)
        return None

    async def _attempt(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
        request: Request,
        *,
        timeout: float,  # noqa: ASYNC109 - as the stub's method calls it
        metadata: Metadata,
    ) -> Reply:
        """Send a command once. Raises TimedOut if for `timeout` seconds neither it nor an earlier one is answered.

        A deadline of gRPC's would also run while the command waits for those before it, which may be slow.
        """
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                self._deadlines[deadline] = request.seq_id
                return await method(request, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            if errors.is_outcome_unknown(error := error_from_rpc(failure)):
                self._doubts[request.seq_id] = error
            raise
        except TimeoutError:
            raise errors.TimedOut(
                f"neither this command nor one before it was answered within {timeout:g} s (Timeouts.training); give "
                "ServiceClient(timeouts=Timeouts(training=...)) a longer one"
            ) from None
        finally:
            self._deadlines.pop(deadline, None)

    def _extend_deadlines(self, answered: int) -> None:
        """Give the commands after one that was answered their full time again."""
        until = asyncio.get_running_loop().time() + self._transport.timeouts.training
        for deadline, seq_id in self._deadlines.items():
            if seq_id > answered and not deadline.expired():
                deadline.reschedule(until)

    async def _counted(self, answer: asyncio.Task[Reply], seq_id: int) -> Reply:
        """Wait for an answer, and use up the seq_id if the command was not accepted.

        If an earlier attempt may have arrived, its error is raised in place of one that says that nothing was executed.
        """
        try:
            reply = await answer
        except errors.PacelineError as error:
            doubt = self._doubts.pop(seq_id, None)
            if not errors.is_outcome_unknown(error):
                self._extend_deadlines(seq_id)
            is_turned_away = errors.is_not_accepted(error) or is_unread(error)
            if doubt is not None and is_turned_away:
                doubt.add_note(f"It was sent again, and turned away: {error}")
                raise doubt from error
            if is_turned_away:
                self.give_back([seq_id])
            elif isinstance(error, errors.SeqIdGap):
                if doubt is None and (missing := int(error.metadata.get("missing", 0))):
                    self._gaps[seq_id] = missing
                    if missing in self._free:
                        self._free_those_behind(missing)
                error.add_note(
                    "If later commands end so too, attach to the run again with ServiceClient.get_training_client."
                )
            elif not errors.is_outcome_unknown(error):
                self._free_those_behind(seq_id)
            raise
        self._doubts.pop(seq_id, None)
        self._free_those_behind(seq_id)
        self._extend_deadlines(seq_id)
        return reply


async def outcomes(calls: Sequence[asyncio.Task[Reply]]) -> Sequence[Outcome[Reply]]:
    """Wait for calls and return the reply or error of each, in order."""
    return await asyncio.gather(*calls, return_exceptions=True)
