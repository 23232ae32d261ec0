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
  leaves commands that later ones have overtaken to `replay`, which runs between the replays of the commands around it.
- The `step` and `next_version` that the journal keeps with an answer are those at the command's place (`Facts`).
- A snapshot of the run after a command is completed when all commands up to that one are answered (`answered`), so that
  no command needs what the snapshot makes superfluous.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from google.protobuf.message import Message

from paceline import errors
from paceline.background import Background
from paceline.log import get_logger
from paceline.waiting_bytes import WaitingBytes
from trainer_service.engine.protocol import EngineDiedError
from trainer_service.failpoints import Failpoints
from trainer_service.journal.journal import RunJournal
from trainer_service.journal.records import AttemptRecord, Facts, RebaseRecord
from trainer_service.runs.answers import Answers, check_digest
from trainer_service.runs.command import Answer, Command, answer_to_record, poisoned
from trainer_service.runs.pending import PendingCommand, PendingCommands
from trainer_service.runs.progress import READING, REPEATABLE, CommandProgress, Executor

_log = get_logger(__name__)

_MAX_UNDER_WAY = 8
"""Most commands of a run that may be executing, to bound what they hold."""


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
        self._max_attempts = max_attempts
        self._executed = last_seq_id
        self._failpoints = failpoints
        self._waiting = PendingCommands(journal, last_seq_id, gap_wait_seconds, tenant, waiting_bytes)
        self._executor: Executor | None = None
        self._former: Executor | None = None
        self._task: asyncio.Task[None] | None = None
        self._finishing = Background("command.finish_failed")
        self._refusal: errors.PacelineError | None = None
        self.is_closed = False
        """Whether the sequencer is closed for good and accepts no more commands."""

    @property
    def last_seq_id(self) -> int:
        """Highest seq_id that was accepted in order: its command has executed, or will."""
        return self._waiting.appended

    @property
    def executed(self) -> int:
        """Highest seq_id whose command has executed far enough for the next to start."""
        return self._executed

    def restore(self, command: Command) -> None:
        """Add the next command of the journal that has no answer; later ones may have one."""
        self._waiting.restore(command)

    def attach(self, attachment: int) -> None:
        """Accept new commands of this client from now on, and none of clients that attached before it.

        Of theirs, commands accepted in order stay, and commands that wait behind a gap are refused.
        """
        self.attachment = attachment
        self._waiting.drop(lambda pending: pending.durable is None and self._is_late(pending.command), _superseded())

    def check_client(self, command: Command) -> None:
        """Raise ClientSuperseded for a command of a superseded client, unless the command was accepted before.

        Raises InvalidArgument for a number that no client was given.
        """
        if command.attachment > self.attachment:
            raise errors.InvalidArgument("is not a number that AttachRun answered for this run", field="attachment")
        if not self._is_late(command) or self.answers.knows(command.seq_id, command.digest):
            return
        pending = self._waiting.get(command.seq_id)
        if pending is None or pending.command.digest != command.digest:
            raise _superseded()

    def knows(self, seq_id: int) -> bool:
        """Return whether a command with this seq_id has already arrived."""
        return seq_id <= self._executed or self._waiting.get(seq_id) is not None

    async def execute(self, command: Command) -> Message:
        """Execute a command at its turn and return its answer; a repeated one gets the first answer.

        The command continues if the caller leaves, because its answer may be asked for again. Raises what the command
        raised, ClientSuperseded, SeqIdReused, SeqIdExpired, DiskFull if it cannot be journaled, QuotaExceeded or
        Overloaded if too many bytes of commands wait, EngineUnavailable if the engine dies while it waits, or SeqIdGap
        if earlier commands do not arrive in time.
        """
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # it would grow with each call and keep the call's command
        if command.seq_id == 0:
            raise errors.MissingField("is not set; a run's commands count from 1", field="seq_id")
        self.check_client(command)
        pending = self._waiting.get(command.seq_id)
        if pending is None and command.seq_id <= self._executed:
            answer = self.answers.again(command.seq_id, command.digest, self._executed)
            if isinstance(answer, errors.PacelineError):
                raise answer
            return answer
        if pending is None:
            pending = self._waiting.accept(command)
            self._advance()
        check_digest(command.digest, pending.command.digest)
        return await asyncio.shield(pending.answer)

    def start(self, executor: Executor) -> None:
        """Execute commands with `executor` from now on."""
        if self._refusal is not None:
            return
        self._executor = executor
        self._advance()

    def hold(self, error: errors.PacelineError) -> None:
        """Execute nothing before the next `start`. Waiters get `error`; their commands stay."""
        self._former, self._executor = self._executor or self._former, None
        for pending in self._waiting:
            if pending.progress is None or not pending.progress.released.is_set():
                pending.put_off(error)
        self._waiting.notify()

    async def recover(self) -> None:
        """After `hold`, roll back what died with the engine; commands that no longer need the engine continue."""
        await self._left_engine()
        if self._former is not None:
            await self._former.close()
        while self._is_undone(self._executed):
            self._executed -= 1

    @property
    def overtaken(self) -> list[int]:
        """Commands without an answer that `replay` has to execute again before later ones continue."""
        keys = sorted(pending.command.seq_id for pending in self._waiting)
        return [seq_id for seq_id in keys if seq_id < self._executed and self._is_undone(seq_id)]

    async def replay(self, seq_id: int, executor: Executor) -> None:
        """Execute a command again at its place, until the next may start. Raises EngineUnavailable."""
        pending = self._waiting.get(seq_id)
        if pending is not None and not await self._begin(pending, executor):
            raise errors.EngineUnavailable("the engine died while the run was restored")

    def place(self, seq_id: int) -> Facts | None:
        """Return the facts after an executed command in the run's order; None if they are no longer known."""
        pending = self._waiting.get(seq_id)
        return self.answers.facts(seq_id) if pending is None else pending.place

    async def answered(self, seq_id: int, executor: Executor) -> None:
        """Wait until every command up to `seq_id` is answered. Raises EngineUnavailable if `executor` is given up."""
        while any(pending.command.seq_id <= seq_id for pending in self._waiting):
            if self._executor is not executor:
                raise errors.EngineUnavailable("a command has to execute again first")
            await self._waiting.changed()

    async def rebase(self, seq_id: int) -> None:
        """Make `seq_id` the next to execute, because the commands before it are lost for good.

        Waiting commands below it are refused; executed ones stay executed.
        """
        if seq_id <= self.last_seq_id + 1:
            return
        self._executed = seq_id - 1
        self._waiting.skip_to(seq_id)
        await self.journal.append(RebaseRecord(seq_id), sync=True)

    def is_poisoned(self, command: Command) -> bool:
        """Return whether the engine died during a command as often as it may."""
        return self.attempts[command.seq_id] >= self._max_attempts

    async def count_death(self, command: Command) -> None:
        """Record durably that the engine died during a command."""
        self.attempts[command.seq_id] += 1
        _log.error("engine died of a command", seq_id=command.seq_id, attempts=self.attempts[command.seq_id])
        await self.journal.append(AttemptRecord(command.seq_id), sync=True)

    def drain(self, error: errors.PacelineError) -> None:
        """Refuse new commands and those that have not started; started ones continue."""
        self._refusal = error
        self._waiting.drop(lambda _: True, error)

    async def close(self, error: errors.PacelineError) -> None:
        """Drain, and wait for the commands that have started."""
        if self.is_closed:
            return
        self.is_closed = True
        self.drain(error)
        executor, self._executor = self._executor, None
        self._waiting.notify()
        await self._left_engine()
        await self._finishing.finish()
        if executor is not None:
            await executor.close()
        await self.journal.close()

    def _is_late(self, command: Command) -> bool:
        """Return whether a superseded client sent the command. A client that did not attach is never superseded."""
        return 0 < command.attachment < self.attachment

    def _advance(self) -> None:
        pending = self._waiting.get(self._executed + 1)
        is_idle = self._task is None or self._task.done()
        if pending is None or pending.durable is None or self._executor is None or not is_idle:
            return
        self._task = asyncio.create_task(self._run(pending, pending.durable, self._executor))
        self._task.add_done_callback(lambda _: self._advance())

    async def _run(self, pending: PendingCommand, durable: asyncio.Future[None], executor: Executor) -> None:
        try:
            await durable
        except errors.PacelineError:
            return  # It was refused, and its waiters got the error.
        while self._executor is executor and self._must_wait(pending.command):
            await self._waiting.changed()
        if self._executor is executor and await self._begin(pending, executor):
            self._executed = max(self._executed, pending.command.seq_id)
            self._failpoints.hit("after_capture")
            await executor.executed(pending.command)
            self._failpoints.hit("after_ack")

    def _must_wait(self, command: Command) -> bool:
        """Return whether a command whose turn has come must wait for those that are executing."""
        under_way = len(self._waiting.under_way())
        alone = command.method not in READING | REPEATABLE
        return under_way > 0 if alone else under_way >= _MAX_UNDER_WAY

    async def _begin(self, pending: PendingCommand, executor: Executor) -> bool:
        """Execute a command until the next may start; return whether it got that far."""
        command = pending.command
        earlier = [progress for other, progress in self._waiting.under_way() if other.method == command.method]
        progress = pending.progress = CommandProgress(earlier, may_overlap=command.method in READING)
        pending.place = None
        self._finishing.spawn(self._finish(pending, progress, executor))
        await progress.captured.wait()
        if progress.ended.is_set():
            return progress.is_answered
        pending.place = executor.facts()
        return True

    async def _finish(self, pending: PendingCommand, progress: CommandProgress, executor: Executor) -> None:
        """Execute a command, keep its answer and resolve it for the waiters."""
        command = pending.command
        try:
            answer = await self._answer(command, progress, executor)
            if isinstance(answer, errors.EngineUnavailable):
                await self._not_executed(command, answer)
                return
            self._failpoints.hit("after_execute")
            record = answer_to_record(command, answer, executor.facts().at(pending.place), progress.version)
            must_sync = isinstance(answer, errors.PacelineError) or command.method not in REPEATABLE
            await self.journal.append(record, sync=must_sync)
            self._failpoints.hit("after_answer")
            self.answers.keep(record)
            self._waiting.remove(command.seq_id)
            self._executed = max(self._executed, command.seq_id)
            progress.is_answered = True
            self._failpoints.hit("before_ack")
            pending.settle(answer)
        finally:
            pending.progress = None
            progress.end()
            self._waiting.notify()

    async def _answer(self, command: Command, progress: CommandProgress, executor: Executor) -> Answer:
        if self.is_poisoned(command):
            return poisoned(self.attempts[command.seq_id])
        self._failpoints.hit("before_execute")
        try:
            return await executor.execute(command, progress)
        except errors.PacelineError as error:
            return error
        except Exception:
            # The error is kept as the answer like any other, so that it does not block later commands.
            answer = errors.Internal.unforeseen()
            _log.exception("command failed", seq_id=command.seq_id, **answer.metadata)
            return answer

    async def _not_executed(self, command: Command, error: errors.EngineUnavailable) -> None:
        """Hold a command that the engine did not execute until the run is restored."""
        if isinstance(error, EngineDiedError):
            await self.count_death(command)
        self.hold(error)

    async def _left_engine(self) -> None:
        """Wait until no command uses the engine."""
        if self._task is not None:
            await asyncio.wait({self._task})
        for _, progress in self._waiting.under_way():
            await progress.released.wait()

    def _is_undone(self, seq_id: int) -> bool:
        """Return whether a command has no answer, and gets none unless it executes again."""
        pending = self._waiting.get(seq_id)
        return pending is not None and pending.progress is None


def _superseded() -> errors.ClientSuperseded:
    message = "another client attached to the run later and trains it now; train with that one, or attach again"
    return errors.ClientSuperseded(message, field="attachment")
