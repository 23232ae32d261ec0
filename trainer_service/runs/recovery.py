"""Bringing runs back into an engine that has lost them: the newest snapshot, then the journal, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from paceline import errors
from paceline.log import get_logger
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import RunState
from trainer_service.engine.base import EngineDiedError
from trainer_service.engine.process import EngineProcess
from trainer_service.failpoints import Failpoints
from trainer_service.journal.records import AnswerRecord, JournalDamagedError
from trainer_service.publish.publisher import Publisher
from trainer_service.runs.command import Answer, Command, answer_from_record, answer_to_record
from trainer_service.runs.executor import CommandVerbs, RunExecutor, SnapshotPolicy
from trainer_service.runs.record import RunRecord
from trainer_service.runs.storage import Past, RunStorage

_log = get_logger(__name__)


class ReplayFailedError(Exception):
    """A command that succeeded before does so no more."""


class Recovery:
    """Rebuilds runs and lets their commands go on."""

    def __init__(
        self,
        engine: EngineProcess,
        storage: RunStorage,
        publisher: Publisher,
        verbs: CommandVerbs,
        policy: SnapshotPolicy,
        failpoints: Failpoints,
    ) -> None:
        self._engine = engine
        self._storage = storage
        self._publisher = publisher
        self._verbs = verbs
        self._policy = policy
        self._failpoints = failpoints

    def start(self, run: RunRecord, replayed: int = 0) -> None:
        """Let a run's commands execute; its state is in the engine, or lost."""
        executor = RunExecutor(
            run,
            self._verbs,
            self._engine.save_state,
            self._publisher.settled,
            self._policy,
            self._failpoints,
            replayed,
        )
        run.sequencer.start(executor)

    async def recover_all(self, runs: Iterable[RunRecord]) -> None:
        """Bring runs into an engine that has just started."""
        await asyncio.gather(*map(self._try_recover, runs))

    async def _try_recover(self, run: RunRecord) -> None:
        async with run.recovering:
            try:
                await self.recover(run)
            except errors.EngineUnavailable:
                _log.warning("engine died while a run was restored", run=run.run_id)
            except Exception:
                _log.exception("run not restored", run=run.run_id)

    async def recover(self, run: RunRecord) -> None:
        """Rebuild a run's state and let its commands go on, or declare it lost. Raises EngineUnavailable."""
        await run.sequencer.idle()
        replayed = 0
        try:
            past = await asyncio.to_thread(self._storage.read, run.run_id)
            run.state = RunState.READY if past.has_state else RunState.LOST
            if past.has_state:
                replayed = await self._rebuild(run, past)
                _log.info("run restored", run=run.run_id, replayed=replayed, seq_id=past.executed)
        except (JournalDamagedError, ReplayFailedError) as damage:
            _log.error("run's state lost: its journal cannot be replayed", run=run.run_id, damage=str(damage))
            await self._engine.delete_run(run.run_id)
            run.state = RunState.LOST
        run.in_engine = run.state is RunState.READY
        self.start(run, replayed)

    async def _rebuild(self, run: RunRecord, past: Past) -> int:
        await self._engine.delete_run(run.run_id)
        await self._engine.create_run(run.run_id, run.parameters)
        run.in_engine = True
        if past.snapshot is not None and past.first == past.snapshot.seq_id + 1:
            await self._engine.load_state(run.run_id, past.snapshot.directory, with_optimizer=True)
        if past.facts is not None:
            run.apply(past.facts)
        replayed = 0
        for seq_id, record in past.history.commands.items():
            if past.first <= seq_id <= past.executed:
                await self._replay(run, Command.from_record(record), past.history.answers.get(seq_id))
                self._failpoints.hit("during_recovery")
                replayed += 1
        if past.facts is not None:
            run.apply(past.facts)
        return replayed

    async def _replay(self, run: RunRecord, command: Command, before: AnswerRecord | None) -> None:
        if before is not None and not _changes_state(command, before):
            await self._remake_version(run, command, before)
            return
        if run.sequencer.is_poisoned(command):
            raise ReplayFailedError(f"the engine dies of command {command.seq_id}")
        try:
            answer: Answer = await self._verbs.execute(run, command)
        except EngineDiedError:
            await run.sequencer.count_death(command)
            raise
        except errors.EngineUnavailable:
            raise
        except errors.PacelineError as error:
            if before is not None and (before.failure is None or before.failure.reason != error.reason):
                raise ReplayFailedError(f"command {command.seq_id} now fails: {error}") from error
            answer = error
        if before is None:
            run.sequencer.answers.keep(answer_to_record(command, answer, run.facts()))

    async def _remake_version(self, run: RunRecord, command: Command, before: AnswerRecord) -> None:
        """Make a version again that was published and had not reached the volume."""
        if command.method != "PublishWeights" or before.facts.latest_version == 0:
            return
        version = before.facts.latest_version
        answer = answer_from_record(before)
        # A publish that nobody acknowledged in time was refused, and its version exists all the same.
        sha256 = answer.model.sha256 if isinstance(answer, pb.PublishWeightsResponse) else ""
        await self._publisher.remake(run, version, command.seq_id, sha256)


def _changes_state(command: Command, before: AnswerRecord) -> bool:
    """Whether executing a command changed the run; a refusal leaves it as it was, but for one that drops a gradient."""
    if before.failure is not None:
        return before.failure.reason == errors.NonFiniteGradient.reason
    if command.method == "ForwardBackward":
        return not command.request.forward_only
    return command.method in {"OptimStep", "LoadCheckpoint"}
