"""Restores runs into an engine that has lost them: loads the newest snapshot, then replays the journal in order.

A run that somebody waits for is restored at once. The others follow one after another, the newest first, and give way
to work that somebody waits for: new work does not wait for runs that were left behind.

A run whose state cannot be rebuilt is lost; its newest intact snapshot is offered as a state checkpoint, from which the
run can continue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from pathlib import Path
from time import perf_counter

from paceline import errors
from paceline.base_model.base_weights import check_same_base
from paceline.files.regular_files import copy_file
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.types import CheckpointKind, RunState
from trainer_service.backoff import backoff
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.commands import CommandExecutor, RunExecutor, SnapshotPolicy
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.protocol import EngineDiedError
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import AnswerRecord, JournalDamagedError
from trainer_service.journal.snapshots import OWN_FILES, Snapshot
from trainer_service.limits.gates import ByteGate, Foreground
from trainer_service.metrics.recorder import Recorder
from trainer_service.publish.publisher import Publisher
from trainer_service.runs.command import Command
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.storage import RunStorage, StoredCommands
from trainer_service.service_metrics import TrainerMetrics
from trainer_service.usage import UsageLedger

_log = get_logger(__name__)

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0
"""Delay between attempts to restore a run: initial and maximum."""
_GIVE_WAY_SECONDS = 5.0
"""How long a step of a restore that nobody waits for gives way to work that somebody waits for."""
_TRANSIENT = (errors.Unavailable, errors.DiskFull, errors.OutOfMemory)
"""Errors that may make a replayed command fail temporarily. The run waits, and is never lost because of them."""


class ReplayFailedError(Exception):
    """A command that succeeded before fails in replay."""


class Recovery:
    """Rebuilds runs and resumes their commands."""

    def __init__(
        self,
        engine: EngineProcess,
        storage: RunStorage,
        publisher: Publisher,
        commands: CommandExecutor,
        policy: SnapshotPolicy,
        memory: ByteGate,
        failpoints: Failpoints,
        spawn: Callable[[Coroutine[None, None, None]], object],
        checkpoints: CheckpointStore,
        registry: RunRegistry,
        metrics: TrainerMetrics,
        recorder: Recorder,
        usage: UsageLedger,
    ) -> None:
        self._usage = usage
        self._engine = engine
        self._recorder = recorder
        self._storage = storage
        self._publisher = publisher
        self._commands = commands
        self._policy = policy
        self._memory = memory
        self._failpoints = failpoints
        self._spawn = spawn
        self._checkpoints = checkpoints
        self._registry = registry
        self._metrics = metrics
        self._deaths: Counter[str] = Counter()
        """Consecutive engine deaths during the replay of a run's answered commands, by run."""
        self._foreground = Foreground()
        self._asked: dict[str, None] = {}
        """The runs that somebody waits for, first asked first; also while no engine runs."""

    def start(self, run: RunRecord, engines_lost: int) -> None:
        """Start a new run's commands; `engines_lost` is the number of engines lost before the run's own."""
        if self._registry.engines_lost == engines_lost:
            run.sequencer.start(self._run_executor(run))
            return
        run.in_engine = run.is_restored = False  # that engine died before the run was registered
        self._spawn(self._try_recover(run))

    def _run_executor(self, run: RunRecord) -> RunExecutor:
        engine, policy, failpoints = self._engine, self._policy, self._failpoints
        return RunExecutor(
            run,
            self._commands,
            engine,
            self._publisher,
            policy,
            failpoints,
            self._foreground,
            self._metrics,
            self._recorder,
            self._usage,
        )

    def ask(self, run: RunRecord) -> None:
        """Restore a run next, unless it is restored: somebody waits for it."""
        if run.is_restored or run.run_id in self._asked:
            return
        self._asked[run.run_id] = None
        self._foreground.wake()
        self._spawn(self._try_recover(run))

    async def recover_all(self) -> None:
        """Restore all runs into an engine that has just started: at once those that somebody waits for.

        Of the others, those come first that have commands to execute.
        """
        engines_lost = self._registry.engines_lost
        runs = {run.run_id: run for run in self._registry}
        # Clients that follow commands do not call again when the engine dies, but they wait.
        self._asked.update({run_id: None for run_id, run in runs.items() if run.sequencer.is_awaited})
        for run_id in [*self._asked]:
            if run_id in runs:
                self._spawn(self._try_recover(runs[run_id]))
            else:
                del self._asked[run_id]
        await asyncio.sleep(0)  # they begin
        for run in sorted(runs.values(), key=_order):
            await self._give_way(run)
            if self._registry.engines_lost != engines_lost:
                return  # the next engine gets them
            if run.run_id in self._asked:
                continue
            if self._deaths[run.run_id] or not await self._attempt(run):
                self._spawn(self._try_recover(run, failures=1))

    async def _give_way(self, run: RunRecord) -> None:
        """Let work go first that somebody waits for, unless somebody waits for this run or for its memory."""
        await self._foreground.give_way(_GIVE_WAY_SECONDS, lambda: run.run_id in self._asked or self._memory.is_awaited)

    async def _try_recover(self, run: RunRecord, failures: int = 0) -> None:
        """Restore a run unless it is restored or closed; retry until that succeeds or the engine dies.

        After the death of an engine, the run is restored into the next one. A run whose replay kills the engine is
        delayed, longer each time, to let the others go first.
        """
        if delay := backoff(max(failures, self._deaths[run.run_id] - 1), _RETRY_SECONDS, _MAX_RETRY_SECONDS):
            await asyncio.sleep(delay)
        while not await self._attempt(run):
            failures += 1
            await asyncio.sleep(backoff(failures, _RETRY_SECONDS, _MAX_RETRY_SECONDS))

    async def _attempt(self, run: RunRecord) -> bool:
        """Restore a run; return whether there is nothing left to do for it with this engine."""
        async with run.recovering:
            is_asked = run.run_id in self._asked
            try:
                if not run.is_restored and not run.sequencer.is_closed:
                    with self._foreground.working() if is_asked else nullcontext():
                        self._check_base(run)
                        await self.recover(run)
                    del self._deaths[run.run_id]
            except errors.BaseMismatch as error:
                _log.error("run not restored: different base model", run=run.run_id, error=error.message)
                run.sequencer.drain(error)
                self._publisher.all_returned(run)
            except errors.EngineUnavailable:
                _log.warning("engine died while a run was restored", run=run.run_id)
                return True  # who waits for it has it restored into the next engine
            except Exception:
                _log.exception("run not restored; retrying", run=run.run_id)
                return False
            self._asked.pop(run.run_id, None)
            return True

    def _check_base(self, run: RunRecord) -> None:
        """Check that the engine has the run's base weights. Raises BaseMismatch.

        A run without a recorded identity of its base weights gets the engine's.
        """
        model = self._engine.describe()
        check_same_base(model.weights_sha256, run.base_sha256, "the run was made on")
        if run.base_model != model.name:
            _log.warning("the base model's name changed", run=run.run_id, was=run.base_model, name=model.name)
        run.base_model, run.base_sha256 = model.name, model.weights_sha256 or run.base_sha256

    async def recover(self, run: RunRecord) -> None:
        """Rebuild a run's state and resume its commands, or declare the run lost. Raises EngineUnavailable."""
        await run.sequencer.recover()
        run.counters_before_replay = run.counters_before_replay or run.counters()
        executor, engines_lost = self._run_executor(run), self._registry.engines_lost
        await self._rebuild_or_lose(run, executor)
        if run.state is RunState.LOST:
            await self.offer_snapshot(run)
        # Work on the disk does not notice that the engine died meanwhile, and with it what was rebuilt.
        run.in_engine = run.state is RunState.READY and self._registry.engines_lost == engines_lost
        if run.state is RunState.LOST:
            # A lost run has nothing to replay them between: each answers at its place that the state is lost.
            for seq_id in run.sequencer.overtaken:
                await run.sequencer.execute_again(seq_id, executor)
        if self._registry.engines_lost != engines_lost:
            raise errors.EngineUnavailable("the engine died while the run was restored")
        run.counters_before_replay, run.counters_at_start, run.is_restored = None, run.counters(), True
        if again := run.sequencer.outstanding:
            # If one of them ends the service each time, this is the last that its log says of the run.
            _log.info("commands without an answer execute now", run=run.run_id, first=again[0], number=len(again))
        run.sequencer.start(executor)
        self._spawn(self._await_versions(run, executor))

    async def _rebuild_or_lose(self, run: RunRecord, executor: RunExecutor) -> None:
        """Rebuild a run from its snapshot and journal. If they do not suffice, it is LOST."""
        try:
            size = await asyncio.to_thread(self._storage.journal_bytes, run.run_id)
            async with self._memory.hold(size):
                past = await self._read(run)
                run.state = RunState.READY if past.has_state else RunState.LOST
                if past.has_state:
                    await self._rebuild(run, past, executor)
                del past  # it counts as this run's memory until here
        except JournalDamagedError as damage:
            await self._mark_lost(run, damage)
            run.damage.append(await run.sequencer.journal.start_over())
        except ReplayFailedError as failure:  # the journal is kept: another engine may replay it
            await self._mark_lost(run, failure)

    async def _read(self, run: RunRecord) -> StoredCommands:
        """Read a run's commands and answers, also answers that the volume was too full for. Raises as the storage."""
        journal = run.sequencer.journal
        before = journal.unwritten()  # it may be written while the files are read, and what was written given up
        past = await asyncio.to_thread(self._storage.read, run.run_id)
        past.history.add_answers([*before, *journal.unwritten()])
        return past

    async def _await_versions(self, run: RunRecord, executor: RunExecutor) -> None:
        """Tell the publisher when the commands that had no answer, which make versions too, have executed again."""
        with suppress(errors.EngineUnavailable):  # the next recovery goes on
            await run.sequencer.answered(run.sequencer.last_seq_id, executor)
            self._publisher.all_returned(run)

    async def _mark_lost(self, run: RunRecord, reason: Exception) -> None:
        _log.error("run's state lost: its journal cannot be replayed", run=run.run_id, reason=str(reason))
        await self._engine.delete_run(run.run_id)
        run.state = RunState.LOST
        run.next_version = max(run.next_version, run.version_limit + 1)

    async def _rebuild(self, run: RunRecord, past: StoredCommands, executor: RunExecutor) -> None:
        await self._engine.delete_run(run.run_id)
        await self._engine.create_run(run.run_id, run.parameters)
        run.in_engine = True
        if past.snapshot is not None and past.first == past.snapshot.seq_id + 1:
            await self._engine.load_state(run.run_id, past.snapshot.directory, with_optimizer=True)
        place = past.counters_before(past.first)
        run.unsaved_seconds = 0.0
        replayed = [seq_id for seq_id in past.history.commands if past.first <= seq_id <= run.sequencer.executed]
        for seq_id in replayed:
            await self._give_way(run)
            if before := past.history.answers.get(seq_id):
                start = perf_counter()
                await self._replay(run, Command.from_record(past.history.commands[seq_id]), before)
                run.unsaved_seconds += perf_counter() - start
                place = before.counters
            elif seq_id in run.sequencer.overtaken:  # a save or a publish: it reads the state that is rebuilt so far
                run.set_place(place)
                await run.sequencer.execute_again(seq_id, executor)
                place = run.counters()
            else:  # it no longer needed the engine when that died: it has ended since, or will end by itself
                place = run.sequencer.place(seq_id) or place
            self._failpoints.hit("during_recovery")
        run.set_place(place)
        executor.count(len(replayed))
        _log.info("run restored", run=run.run_id, replayed=len(replayed))

    async def _replay(self, run: RunRecord, command: Command, before: AnswerRecord) -> None:
        if not _changes_state(command, before):
            await self._remake_version(run, command, before)
            return
        if command.method == "LoadCheckpoint" and run.snapshots.pinned(command.seq_id) is None:
            # Its path may name other files by now.
            raise ReplayFailedError(f"the checkpoint that command {command.seq_id} loaded is no longer kept")
        try:
            await self._commands.execute(run, command, CommandProgress(is_replay=True))
        except EngineDiedError:
            # The command was answered, so the engine has executed it before: it is never given up.
            self._deaths[run.run_id] += 1
            raise
        except _TRANSIENT as error:
            if before.failure is None or before.failure.reason != error.reason:
                raise
        except errors.PacelineError as error:
            if before.failure is None or before.failure.reason != error.reason:
                raise ReplayFailedError(f"command {command.seq_id} now fails: {error}") from error

    async def _remake_version(self, run: RunRecord, command: Command, before: AnswerRecord) -> None:
        """Remake a version that was published but had not reached the volume."""
        if before.version == 0:
            return
        await self._publisher.recreate(run, before.version, command.seq_id, before.version_blake3)

    async def offer_snapshot(self, run: RunRecord, failures: int = 0) -> None:
        """Convert a lost run's newest snapshot to a checkpoint, unless its newest state checkpoint is as recent.

        Where the volume cannot be read or written at the moment, it is tried again in the background.
        """
        try:
            snapshot = await asyncio.to_thread(run.snapshots.newest)
            newest = await self._checkpoints.newest_states.find(run.run_id)
            if snapshot is not None and snapshot.seq_id > newest.seq_id:
                await self._save_checkpoint(run, snapshot)
        except (errors.PacelineError, OSError) as error:
            _log.warning("a lost run's snapshot is not offered as a checkpoint", run=run.run_id, error=str(error))
            if isinstance(error, OSError):
                self._spawn(self._offer_again(run, failures + 1))

    async def _offer_again(self, run: RunRecord, failures: int) -> None:
        await asyncio.sleep(backoff(failures, _RETRY_SECONDS, _MAX_RETRY_SECONDS))
        async with run.recovering:
            if run.state is RunState.LOST and not run.is_deleted:
                await self.offer_snapshot(run, failures)

    async def _save_checkpoint(self, run: RunRecord, snapshot: Snapshot) -> None:
        async def write(staging: Path) -> None:
            await asyncio.to_thread(_copy_state, snapshot.directory, staging)

        path = CheckpointPath(run.run_id, CheckpointKind.STATE, f"restored-{snapshot.seq_id}")
        made = await self._checkpoints.save(
            path,
            write,
            base_model=run.base_model,
            base_sha256=run.base_sha256,
            tenant=run.tenant,
            step=snapshot.counters.step,
            seq_id=snapshot.seq_id,
            ttl_seconds=None,
            overwrite=False,
        )
        _log.warning("a lost run's newest snapshot is offered as a checkpoint", run=run.run_id, path=made.path)


def _order(run: RunRecord) -> tuple[bool, float]:
    """Sort runs with commands to execute first, then newer ones before older ones."""
    return run.sequencer.executed >= run.sequencer.last_seq_id, -run.create_time.timestamp()


def _changes_state(command: Command, before: AnswerRecord) -> bool:
    """Return whether a command changed the run. Refused commands do not, except where the refusal drops a gradient."""
    if before.failure is not None:
        return before.failure.reason == errors.NonFiniteGradient.reason
    if command.method == "ForwardBackward":
        return not command.request.forward_only
    return command.method in {"OptimStep", "LoadCheckpoint"}


def _copy_state(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.name not in OWN_FILES:
            copy_file(path, target / path.name)
