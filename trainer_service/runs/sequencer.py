"""Ordered, exactly-once execution of one run's commands, across the death of any process.

A command arrives with a seq_id. Once all commands before it have arrived, it is appended to the run's journal. Once it
is durable there and the commands before it have executed, it executes. Its answer, a reply or an error, is kept, in the
journal too, and a caller that sends the same command again gets that answer. While the run's state is not in the
engine, commands are accepted and wait.

A command that only reads the run's state (SaveCheckpoint, PublishWeights) lets the next one start once it has captured
that state, so answers may come out of order. The following holds all the same:

- Commands capture in order of seq_id: each sees the run as the commands before it left it, without effects of later
  ones.
- Where commands of the same kind make their results visible in order (`CommandProgress.wait_for_earlier`), the answer
  of one is in the journal before the result of the next becomes visible.
- A command that replaces the run's state (LoadCheckpoint) starts when all commands before it are answered.
- When the engine or the service dies, a command without an answer executes again at its place in the order: `recover`
  leaves commands that later ones have overtaken to `execute_again`, which runs between the replays of the commands
  around it.
- The `step` and `next_version` that the journal keeps with an answer are those at the command's place (`Counters`).
- A snapshot of the run after a command is completed when all commands up to that one are answered (`answered`), so that
  no command needs what the snapshot makes superfluous.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Protocol

from google.protobuf.message import Message

from paceline import errors, tracing
from paceline.background import Background
from paceline.log import get_logger
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.types import CommandState
from trainer_service.engine_link.protocol import EngineDiedError
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import AttemptRecord, Counters
from trainer_service.journal.journal import RunJournal
from trainer_service.runs.command import Answers, Command, Outcome, answer_of, answer_to_record
from trainer_service.runs.pending import READING, PendingCommand, PendingCommands, PendingState
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.status import CommandStatus, StatusStream, ToTell, status_of_answer, status_of_pending

_log = get_logger(__name__)

REPEATABLE = frozenset({"ForwardBackward", "OptimStep"})
"""Commands that do the same when executed again, and reply the same except for times that they measure.

Their replies need not be durable before they are sent.
"""
_NOT_DURABLE = frozenset({PendingState.HELD, PendingState.WRITING})
_MAX_SKIPPED = 1 << 20
"""How far ahead of its last command a lost run may continue: far above the commands that can have been lost."""
_MAX_EXECUTING = 8
"""Most commands of a run that may be executing, to bound what they hold."""


class Executor(Protocol):
    """Executes a run's commands."""

    async def execute(self, command: Command, progress: CommandProgress) -> Outcome:
        """Execute a command. Raises PacelineError; EngineUnavailable means that it was not executed."""

    def counters(self) -> Counters:
        """Return the run's current counters."""

    def abandon(self, command: Command) -> None:
        """Leave out the version number of a command that began before the engine died and is not executed again."""

    async def executed(self, command: Command) -> None:
        """Do what must happen between this command, which may still be executing, and the next."""

    async def save(self, seq_id: int) -> None:
        """Save what a restart would otherwise have to execute again; `seq_id` is the last command that executed."""

    async def close(self) -> None:
        """Finish the work that continues in the background."""


class Sequencer:
    """Executes one run's commands in order of seq_id, each once."""

    def __init__(
        self,
        journal: RunJournal,
        answers: Answers,
        last_seq_id: int,
        *,
        gap_wait_seconds: float,
        max_attempts: int,
        failpoints: Failpoints,
        tenant: str,
        waiting_bytes: WaitingBytes,
    ) -> None:
        """Accept commands after `last_seq_id`; execute none before `start`.

        Bytes of waiting commands count as those of `tenant`, which owns the run.
        """
        self.journal = journal
        self.answers = answers
        self.attempts: Counter[int] = Counter()
        """How often the engine died while it executed a command, by seq_id."""
        self.attachment = 0
        """Number of the newest client that attached; new commands of clients that attached earlier are refused."""
        self.executed = last_seq_id
        """Highest seq_id whose command has executed far enough for the next to start."""
        self.is_closed = False
        """Whether the sequencer is closed for good and accepts no more commands."""
        self._max_attempts = max_attempts
        self._failpoints = failpoints
        self._waiting = PendingCommands(journal, last_seq_id, gap_wait_seconds, tenant, waiting_bytes, self._advance)
        self._executor: Executor | None = None
        self._previous_executor: Executor | None = None
        self._change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._finishing = Background("command.finish_failed")
        self._refusal: errors.PacelineError | None = None

    @property
    def last_seq_id(self) -> int:
        """Highest seq_id that was accepted in order: its command has executed, or will."""
        return self._waiting.appended

    def restore(self, command: Command) -> None:
        """Add the next command of the journal that has no answer; later ones may have one."""
        self._waiting.restore(command)

    def attach(self, attachment: int) -> None:
        """Accept new commands of this client from now on, and none of clients that attached before it.

        Of theirs, commands accepted in order stay, and commands that wait behind a gap are refused.
        """
        self.attachment = attachment
        self._waiting.give_up_held(self._is_superseded, _superseded())

    def check_newest(self, attachment: int) -> None:
        """Raise ClientSuperseded if another client has attached since the one with this number."""
        if attachment != self.attachment:
            raise _superseded()

    def left_to(self, attachment: int) -> list[int]:
        """Return the commands of other clients than this one that have not ended, or not taken their places yet."""
        pending = self._waiting.by_seq_id.items()
        return sorted(seq_id for seq_id, one in pending if one.command.attachment != attachment)

    async def cancel_waiting(self, attachment: int) -> None:
        """Refuse the commands of other clients that have not started, durably: in the journal, and behind a gap.

        Raises DiskFull or EngineUnavailable if that cannot be written.
        """
        self._waiting.give_up_held(lambda command: command.attachment != attachment, _superseded())
        await self._waiting.cancel(lambda command: command.attachment != attachment)

    def check_client(self, command: Command) -> None:
        """Raise ClientSuperseded for a command of a superseded client, unless the command was accepted before.

        Raises InvalidArgument for a number that no client was given.
        """
        if command.attachment > self.attachment:
            raise errors.InvalidArgument("is not a number that AttachRun returned for this run", field="attachment")
        if not self._is_superseded(command):
            return
        pending = self._waiting.by_seq_id.get(command.seq_id)
        known = self.answers.get(command.seq_id) if pending is None else pending.command
        # An equal command of the client that attached since is not this one's.
        if known is None or (known.digest, known.attachment) != (command.digest, command.attachment):
            raise _superseded()

    async def execute(self, command: Command, check: Callable[[Command], Awaitable[Command]] | None = None) -> Message:
        """Execute a command at its turn and return its answer; a repeated one gets the first answer.

        The command continues if the caller leaves, because its answer may be asked for again. Raises as `submit`, what
        the command raised, SeqIdReused, SeqIdExpired, and SeqIdGap if earlier commands do not arrive in time.
        """
        async with aclosing(await self.submit(command, check)) as stream:
            status = await stream.last()
        if status.is_another:
            raise errors.SeqIdReused("was used with another payload; use the next one", field="seq_id")
        if status.answer_expired or status.answer is None:
            raise errors.SeqIdExpired(
                f"was executed, but its answer is no longer kept; continue at {self.executed + 1}",
                field="seq_id",
                metadata={"last_seq_id": str(self.executed)},
            )
        if isinstance(status.answer, errors.PacelineError):
            raise status.answer.with_traceback(None)  # it would grow with each caller, and keep the caller's command
        return status.answer

    async def submit(
        self, command: Command, check: Callable[[Command], Awaitable[Command]] | None = None
    ) -> StatusStream:
        """Take a command and return its statuses once it is held behind a gap, or durable. Close the stream.

        `check` is called with a command that has not arrived before, and returns it, or its refusal. An error means
        that the trainer does not have the command: ClientSuperseded, InvalidArgument, MissingField, DiskFull if it
        cannot be journaled, QuotaExceeded or Overloaded if too much waits, or what the run was closed with.
        """
        self.check_client(command)
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # it would grow with each call and keep the call's command
        if command.seq_id == 0:
            raise errors.MissingField("is not set; a run's commands are numbered from 1", field="seq_id")
        pending = self._waiting.by_seq_id.get(command.seq_id)
        if pending is None and command.seq_id > self.executed:
            if check is not None:
                with self._waiting.arriving(command):
                    command = await check(command)
                return await self.submit(command)  # meanwhile the same one may have arrived, or the run been closed
            pending = self._waiting.accept(command)
            self._advance()
        (status,) = self._describe(self._arrived([command.seq_id])) or [self._status_of_past(command.seq_id)]
        if status.digest not in {command.digest, b""}:
            return StatusStream({command.seq_id: status.of_another()})
        stream = StatusStream({command.seq_id: status}, [] if pending is None else [pending], self._describe)
        if pending is not None:
            await self._while_written(pending, stream)
        return stream

    async def _while_written(self, pending: PendingCommand, stream: StatusStream) -> None:
        """Wait while a command is written to the journal. Raises why it is not accepted, or not ended here."""
        try:
            while pending.state is PendingState.WRITING:
                await stream.change()
            if (error := pending.given_up) is not None:
                raise error.with_traceback(None)
        except BaseException:
            await stream.aclose()
            raise

    def follow(self, seq_ids: Sequence[int]) -> StatusStream:
        """Return the statuses of commands. Close the stream."""
        pending = self._arrived(seq_ids)
        found = {status.seq_id: status for status in self._describe(pending)}
        # Replies may be large, and their reader slow: each is read when it is its turn, not all at once.
        first = {seq_id: found.get(seq_id) or self._read_past(seq_id) for seq_id in seq_ids}
        return StatusStream(first, pending, self._describe)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody watches a command that has not ended."""
        return any(pending.watchers for pending in self._waiting.by_seq_id.values())

    def is_pending_read(self, seq_id: int) -> bool:
        """Whether a command that only reads the run's state has not ended."""
        pending = self._waiting.by_seq_id.get(seq_id)
        return pending is not None and pending.command.method in READING

    @property
    def outstanding(self) -> list[int]:
        """Commands that have not ended, in order."""
        return sorted(key for key, one in self._waiting.by_seq_id.items() if not one.state.has_ended)

    def states(self) -> Counter[CommandState]:
        """Return how many commands that have not ended are in each state. Thread-safe."""
        pending = list(self._waiting.by_seq_id.values())
        return Counter(one.state.public for one in pending if not one.state.has_ended)

    @property
    def must_publish(self) -> bool:
        """Whether a PublishWeights that was accepted has no answer."""
        commands = (one.command for one in self._waiting.by_seq_id.values())
        return any(command.method == "PublishWeights" and command.refusal is None for command in commands)

    def _arrived(self, seq_ids: Sequence[int]) -> list[PendingCommand]:
        """Return those of the commands that are held, accepted or executing, or are refused before their turn."""
        found = (self._waiting.by_seq_id.get(seq_id) for seq_id in dict.fromkeys(seq_ids))
        return [pending for pending in found if pending is not None]

    def _read_past(self, seq_id: int) -> ToTell:
        """Return how to read the status of an answered command; or that of one that has not arrived, or raise."""
        return partial(self._status_of_past, seq_id) if 0 < seq_id <= self.executed else self._status_of_past(seq_id)

    def _status_of_past(self, seq_id: int) -> CommandStatus:
        """Return the status of a command that was answered, or has not arrived. Raises why the run takes none."""
        if 0 < seq_id <= self.executed:
            return status_of_answer(seq_id, self.answers.get(seq_id))
        if self._refusal is not None:  # it may be in the journal, and be let go of
            raise self._refusal.with_traceback(None)
        return CommandStatus(seq_id, CommandState.NOT_ARRIVED)

    def _describe(self, commands: Sequence[PendingCommand]) -> list[CommandStatus]:
        """Return the statuses of commands that have arrived, in one pass over all that have not ended."""
        outstanding, missing = self.outstanding, self._waiting.missing
        return [
            status_of_pending(pending, ahead=bisect_left(outstanding, pending.command.seq_id), missing=missing)
            for pending in commands
        ]

    def start(self, executor: Executor) -> None:
        """Execute commands with `executor` from now on."""
        if self._refusal is not None:
            return
        self._executor = executor
        self._advance()

    def pause(self) -> None:
        """Execute nothing before the next `start`."""
        self._previous_executor, self._executor = self._executor or self._previous_executor, None
        self._notify()

    async def recover(self) -> None:
        """After `pause`, roll back what died with the engine; commands that no longer need the engine continue."""
        await self._engine_unused()
        if self._previous_executor is not None:
            await self._previous_executor.close()
        while self._must_execute_again(self.executed):
            self.executed -= 1

    @property
    def overtaken(self) -> list[int]:
        """Commands without an answer that `execute_again` has to execute before later ones continue."""
        return [
            seq_id
            for seq_id in sorted(self._waiting.by_seq_id)
            if seq_id < self.executed and self._must_execute_again(seq_id)
        ]

    async def execute_again(self, seq_id: int, executor: Executor) -> None:
        """Execute a command without an answer at its place, until the next may start. Raises EngineUnavailable."""
        pending = self._waiting.by_seq_id.get(seq_id)
        if pending is not None and not await self._begin(pending, executor):
            raise errors.EngineUnavailable("the engine died while the run was restored")

    def place(self, seq_id: int) -> Counters | None:
        """Return the counters after an executed command in the run's order; None if they are no longer known."""
        pending = self._waiting.by_seq_id.get(seq_id)
        return self.answers.counters(seq_id) if pending is None else pending.place

    async def taken(self, seq_ids: Collection[int], seconds: float) -> None:
        """Wait until commands have taken their places: one that is refused has ended before its turn.

        Waits at most `seconds`, and not once the run takes no commands.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._refusal is None and not self._waiting.by_seq_id.keys().isdisjoint(seq_ids):
                    await self._change.wait()

    async def answered(self, seq_id: int, executor: Executor) -> None:
        """Wait until every command up to `seq_id` is answered. Raises EngineUnavailable if `executor` is given up."""
        while any(waiting <= seq_id for waiting in self._waiting.by_seq_id):
            if self._executor is not executor:
                raise errors.EngineUnavailable("a command has to execute again first")
            await self._change.wait()

    async def rebase(self, seq_id: int) -> None:
        """Make `seq_id` the next to execute, because the commands before it are lost for good.

        Waiting commands below it are refused; executed ones stay executed. Raises OutOfRange for a seq_id so far ahead
        that it is a mistake: a run never goes back, so that too few would be left for the commands after it.
        """
        if seq_id <= self.last_seq_id + 1:
            return
        if seq_id > (furthest := self.last_seq_id + _MAX_SKIPPED):
            raise errors.OutOfRange(f"is {seq_id}; a lost run continues at {furthest} at most", field="seq_id")
        self.executed = seq_id - 1
        rebased = self._waiting.skip_to(seq_id)
        self._advance()
        await rebased

    def drain(self, error: errors.PacelineError) -> None:
        """Refuse new commands and those that have not started; started ones continue."""
        self._refusal = error
        self._waiting.leave(error)
        self._notify()

    async def save(self) -> None:
        """After `drain`, save the run's state once no command uses the engine, unless the run is not in the engine."""
        await self._engine_unused()
        if self._executor is not None:
            await self._executor.save(self.executed)

    async def close(self, error: errors.PacelineError) -> None:
        """Drain, and wait for the commands that have started."""
        if self.is_closed:
            return
        self.is_closed = True
        self.drain(error)
        executor, self._executor = self._executor, None
        self._notify()
        await self._engine_unused()
        await self._finishing.finish()
        self.drain(error)  # also what was to execute again, because the engine died
        if executor is not None:
            await executor.close()
        await self.journal.flush()

    def _is_superseded(self, command: Command) -> bool:
        """Return whether a superseded client sent the command. A client that did not attach is never superseded."""
        return 0 < command.attachment < self.attachment

    def _notify(self) -> None:
        """Wake everything that waits for a change."""
        self._change.set()
        self._change = asyncio.Event()

    def _advance(self) -> None:
        """Execute the next command, if it is durable and the one before it has executed far enough."""
        pending = self._waiting.by_seq_id.get(self.executed + 1)
        is_idle = self._task is None or self._task.done()
        if pending is None or pending.state in _NOT_DURABLE or self._executor is None or not is_idle:
            return
        self._task = asyncio.create_task(self._run(pending, self._executor))
        self._task.add_done_callback(lambda _: self._advance())

    async def _run(self, pending: PendingCommand, executor: Executor) -> None:
        while self._executor is executor and self._must_wait(pending.command):
            await self._change.wait()
        is_refused = self._waiting.by_seq_id.get(pending.command.seq_id) is not pending  # by `drain`, meanwhile
        if self._executor is executor and not is_refused and await self._begin(pending, executor):
            self.executed = max(self.executed, pending.command.seq_id)
            self._failpoints.hit("after_capture")
            await executor.executed(pending.command)
            self._failpoints.hit("after_ack")

    def _must_wait(self, command: Command) -> bool:
        """Return whether a command whose turn has come must wait for those that are executing."""
        executing = len(self._waiting.executing())
        return executing >= (_MAX_EXECUTING if command.method in READING | REPEATABLE else 1)

    async def _begin(self, pending: PendingCommand, executor: Executor) -> bool:
        """Execute a command until the next may start; return whether it got that far."""
        command = pending.command
        earlier = [progress for other, progress in self._waiting.executing() if other.method == command.method]
        progress = pending.progress = CommandProgress(earlier, may_overlap=command.method in READING)
        pending.place, pending.may_have_begun = None, True
        if pending.state is PendingState.ACCEPTED:  # a refused one has ended already, and only takes its place
            pending.begun_at = asyncio.get_running_loop().time()
            pending.move(PendingState.EXECUTING)
        self._finishing.spawn(self._finish(pending, progress, executor))
        await progress.captured.wait()
        if progress.ended.is_set():
            return progress.is_answered
        pending.place = executor.counters()
        return True

    async def _finish(self, pending: PendingCommand, progress: CommandProgress, executor: Executor) -> None:
        """Execute a command, keep its answer and resolve it for the waiters."""
        command = pending.command
        try:
            outcome = await self._outcome(command, progress, executor)
            answer = outcome.answer
            if isinstance(answer, errors.EngineUnavailable):
                if isinstance(answer, EngineDiedError):
                    deaths = self.attempts[command.seq_id] = self.attempts[command.seq_id] + 1
                    _log.error("engine died during a command", seq_id=command.seq_id, attempts=deaths)
                    await self.journal.append(AttemptRecord(command.seq_id), sync=True)
                self.pause()
                return
            self._failpoints.hit("after_execute")
            counters = executor.counters()
            if pending.place is not None:
                counters = counters.at(pending.place)
            record = answer_to_record(command, outcome, counters)
            must_sync = isinstance(answer, errors.PacelineError) or command.method not in REPEATABLE
            with tracing.continued(command.trace), tracing.span("answer"):
                await self.journal.append(record, sync=must_sync)
            self._failpoints.hit("after_answer")
            self.answers.keep(record)
            self._waiting.answered(command.seq_id)
            self.executed = max(self.executed, command.seq_id)
            progress.is_answered = True
            self._failpoints.hit("before_ack")
            if pending.state is PendingState.EXECUTING:
                is_refused = isinstance(answer, errors.PacelineError)
                pending.move(PendingState.REFUSED if is_refused else PendingState.SUCCEEDED, answer)
        finally:
            pending.progress = None
            if pending.state is PendingState.EXECUTING:
                pending.move(PendingState.ACCEPTED)  # the engine died: it executes again
            progress.end()
            self._notify()

    async def _outcome(self, command: Command, progress: CommandProgress, executor: Executor) -> Outcome:
        deaths = self.attempts[command.seq_id]
        if deaths >= self._max_attempts:
            executor.abandon(command)
            message = f"the engine died {deaths} time(s) while it executed this; it is not retried"
            return Outcome(errors.PoisonedCommand(message, field="seq_id", metadata={"attempts": str(deaths)}))
        self._failpoints.hit("before_execute")
        try:
            return await executor.execute(command, progress)
        except Exception as error:
            return Outcome(answer_of(command, error))

    async def _engine_unused(self) -> None:
        """Wait until no command uses the engine."""
        if self._task is not None:
            await asyncio.wait({self._task})
        for _, progress in self._waiting.executing():
            await progress.released.wait()

    def _must_execute_again(self, seq_id: int) -> bool:
        """Return whether a command has no answer, and gets none unless it executes again."""
        pending = self._waiting.by_seq_id.get(seq_id)
        return pending is not None and pending.progress is None


def _superseded() -> errors.ClientSuperseded:
    message = "another client has attached to the run since; use that one, or attach again"
    return errors.ClientSuperseded(message, field="attachment")
