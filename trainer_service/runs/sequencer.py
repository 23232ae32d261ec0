"""Order and exactly-once of one run's commands, across the death of any process.

A command arrives with a seq_id. As soon as all before it have arrived it is appended to the run's journal; once that is
durable and those before it have executed, it executes; its answer, good or bad, is kept, in the journal too, and
whoever sends the same command again gets that answer. While the run's state is not in the engine commands are taken
and wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from google.protobuf.message import Message

from paceline import errors
from paceline.log import get_logger
from trainer_service.engine.base import EngineDiedError
from trainer_service.failpoints import Failpoints
from trainer_service.journal.journal import RunJournal
from trainer_service.journal.records import AttemptRecord, Facts, RebaseRecord
from trainer_service.runs.answers import Answers, check_digest
from trainer_service.runs.command import Answer, Command, answer_to_record

_log = get_logger(__name__)

_REPEATABLE = frozenset({"ForwardBackward", "OptimStep"})
"""Commands whose replies come out the same when they are executed again, so that they need not be durable first."""


class Executor(Protocol):
    """Executes a run's commands."""

    async def execute(self, command: Command) -> Message:
        """Execute a command. Raises PacelineError; EngineUnavailable means that it was not executed."""
        ...

    def facts(self) -> Facts:
        """Return what is known of the run now."""
        ...

    async def executed(self, command: Command) -> None:
        """Do what must come between this command and the next."""
        ...

    async def close(self) -> None:
        """Finish what goes on behind the commands."""
        ...


@dataclass(slots=True, eq=False)
class _Pending:
    command: Command
    answer: asyncio.Future[Message]
    durable: asyncio.Future[None] | None = None
    """Set when it was appended to the journal."""
    started: bool = False


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
    ) -> None:
        """Take commands after `last_seq_id`; execute none before `start`."""
        self.journal = journal
        self.answers = answers
        self.attempts: Counter[int] = Counter()
        """How often the engine died of a command."""
        self._max_attempts = max_attempts
        self._executed = self._appended = last_seq_id
        self._gap_wait = gap_wait_seconds
        self._failpoints = failpoints
        self._pending: dict[int, _Pending] = {}
        self._executor: Executor | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed: errors.PacelineError | None = None
        journal.on_refused = self._refuse

    @property
    def last_seq_id(self) -> int:
        """Highest seq_id that was accepted in order: it has executed, or will."""
        return self._appended

    def restore(self, command: Command) -> None:
        """Take in the next command of a journal, which has no answer yet."""
        pending = self._add(command)
        pending.durable = asyncio.get_running_loop().create_future()
        pending.durable.set_result(None)
        self._appended = command.seq_id

    async def execute(self, command: Command) -> Message:
        """Execute a command at its turn and return its answer; a repeated one gets the first answer.

        The command goes on when the caller leaves: another may ask for its answer. Raises what the command raised,
        SeqIdReused, SeqIdExpired, DiskFull when it cannot be journaled, EngineUnavailable when the engine dies while it
        waits, or SeqIdGap when those before it do not come in time.
        """
        if self._closed is not None:
            raise self._closed
        if command.seq_id == 0:
            raise errors.MissingField("is not set; a run's commands count from 1", field="seq_id")
        if command.seq_id <= self._executed:
            answer = self.answers.again(command.seq_id, command.digest, self._executed)
            if isinstance(answer, errors.PacelineError):
                raise answer
            return answer
        pending = self._pending.get(command.seq_id) or self._accept(command)
        check_digest(command.digest, pending.command.digest)
        return await asyncio.shield(pending.answer)

    def start(self, executor: Executor) -> None:
        """Execute commands with `executor` from now on."""
        if self._closed is not None:
            return
        self._executor = executor
        self._advance()

    def hold(self, error: errors.PacelineError) -> None:
        """Execute none before the next `start`. Those who wait are told `error`; their commands stay."""
        self._executor = None
        for pending in self._pending.values():
            _settle(pending, error)
            pending.answer = _new_answer()

    async def rebase(self, seq_id: int) -> None:
        """Make `seq_id` the next to execute where the commands before it are lost for good.

        Commands that wait below it are refused; those executed stay executed.
        """
        if seq_id <= self._appended + 1:
            return
        self._appended = self._executed = seq_id - 1
        await self.journal.append(RebaseRecord(seq_id), sync=True)
        lost = errors.RunStateLost("the run was restored by a later command", field="seq_id")
        self._drop(lambda pending: pending.command.seq_id < seq_id, lost)

    def is_poisoned(self, command: Command) -> bool:
        """Whether the engine died of a command as often as it may."""
        return self.attempts[command.seq_id] >= self._max_attempts

    async def count_death(self, command: Command) -> None:
        """Note durably that the engine died of a command."""
        self.attempts[command.seq_id] += 1
        _log.error("engine died of a command", seq_id=command.seq_id, attempts=self.attempts[command.seq_id])
        await self.journal.append(AttemptRecord(command.seq_id), sync=True)

    async def close(self, error: errors.PacelineError) -> None:
        """Refuse what has not started and what comes, and wait for what has started."""
        if self._closed is not None:
            return
        self._closed = error
        self._drop(lambda pending: not pending.started, error)
        executor, self._executor = self._executor, None
        await self.idle()
        if executor is not None:
            await executor.close()
        await self.journal.close()

    async def idle(self) -> None:
        """Return when no command is executing."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _accept(self, command: Command) -> _Pending:
        pending = self._add(command)
        asyncio.get_running_loop().call_later(self._gap_wait, self._give_up, pending)
        while following := self._pending.get(self._appended + 1):
            following.durable = self.journal.append(following.command.to_record(), sync=True)
            self._appended += 1
        self._advance()
        return pending

    def _add(self, command: Command) -> _Pending:
        pending = self._pending[command.seq_id] = _Pending(command, _new_answer())
        return pending

    def _advance(self) -> None:
        pending = self._pending.get(self._executed + 1)
        is_idle = self._task is None or self._task.done()
        if pending is None or pending.durable is None or self._executor is None or not is_idle:
            return
        pending.started = True
        self._task = asyncio.create_task(self._run(pending, pending.durable, self._executor))
        self._task.add_done_callback(lambda _: self._advance())

    async def _run(self, pending: _Pending, durable: asyncio.Future[None], executor: Executor) -> None:
        try:
            await durable
        except errors.PacelineError:
            return  # It was refused, and everybody who waited was told.
        command = pending.command
        answer = await self._answer(command, executor)
        if isinstance(answer, errors.EngineUnavailable):
            pending.started = False
            await self._not_executed(command, answer)
            return
        self._failpoints.hit("after_execute")
        record = answer_to_record(command, answer, executor.facts())
        must_sync = isinstance(answer, errors.PacelineError) or command.method not in _REPEATABLE
        await self.journal.append(record, sync=must_sync)
        self._failpoints.hit("after_answer")
        self.answers.keep(record)
        del self._pending[command.seq_id]
        self._executed = command.seq_id
        self._failpoints.hit("before_ack")
        _settle(pending, answer)
        await executor.executed(command)
        self._failpoints.hit("after_ack")

    async def _answer(self, command: Command, executor: Executor) -> Answer:
        if self.is_poisoned(command):
            deaths = str(self.attempts[command.seq_id])
            message = f"the engine died {deaths} time(s) while it executed this; it is not tried again"
            return errors.PoisonedCommand(message, field="seq_id", metadata={"attempts": deaths})
        self._failpoints.hit("before_execute")
        try:
            return await executor.execute(command)
        except errors.PacelineError as error:
            return error
        except Exception:
            # Whatever it was, its answer is kept like any other, so that the commands after it are not held up.
            error_id = uuid4().hex
            _log.exception("command failed", seq_id=command.seq_id, error_id=error_id)
            message = f"internal error; the service's log has it under {error_id}"
            return errors.Internal(message, metadata={"error_id": error_id})

    async def _not_executed(self, command: Command, error: errors.EngineUnavailable) -> None:
        """Keep a command that the engine did not execute until the run is back."""
        if isinstance(error, EngineDiedError):
            await self.count_death(command)
        self.hold(error)

    def _refuse(self, error: errors.PacelineError) -> None:
        """Take back the commands that could not be journaled: none was executed, and their seq_ids are free."""
        durable = {
            key
            for key, pending in self._pending.items()
            if pending.durable is not None and pending.durable.done() and not pending.durable.exception()
        }
        self._appended = max(durable, default=self._executed)
        self._drop(lambda pending: pending.command.seq_id > self._appended and pending.durable is not None, error)

    def _drop(self, is_dropped: Callable[[_Pending], bool], error: errors.PacelineError) -> None:
        for pending in [pending for pending in self._pending.values() if is_dropped(pending)]:
            del self._pending[pending.command.seq_id]
            _settle(pending, error)

    def _give_up(self, pending: _Pending) -> None:
        seq_id = pending.command.seq_id
        if self._pending.get(seq_id) is not pending or pending.durable is not None:
            return
        del self._pending[seq_id]
        missing = next(earlier for earlier in range(self._appended + 1, seq_id) if earlier not in self._pending)
        message = f"command {missing} did not come within {self._gap_wait:g} s; send it, then this one again"
        _settle(pending, errors.SeqIdGap(message, field="seq_id", metadata={"missing": str(missing)}))


def _new_answer() -> asyncio.Future[Message]:
    answer = asyncio.get_running_loop().create_future()
    # A failure may find nobody waiting any more; it is kept as the answer all the same.
    answer.add_done_callback(lambda future: future.cancelled() or future.exception())
    return answer


def _settle(pending: _Pending, answer: Answer) -> None:
    if isinstance(answer, errors.PacelineError):
        pending.answer.set_exception(answer)
    else:
        pending.answer.set_result(answer)
