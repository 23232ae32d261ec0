"""What each command of a run does: execute what its request asks for, encode its reply; snapshots between them.

The sequencer handles ordering and repetition; here each call executes the command once, for callers and for replays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline import codec, errors, layout, tracing, weights
from paceline.base_model.base_weights import check_same_base
from paceline.codec.resources import checkpoint_to_proto, run_to_proto
from paceline.log import get_logger
from paceline.requests.bodies import decoded
from paceline.rpc.identity import Identity
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import (
    Checkpoint,
    CheckpointKind,
    ForwardBackwardOutput,
    LoraConfig,
    RunState,
)
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.command_inputs import InputLimits, Load, Pass, Publish, Save, Step, input_of
from trainer_service.engine_link.client import EngineProcess
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import AnswerRecord, Counters
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.limits.gates import Foreground
from trainer_service.metrics.recorder import Recorder, Turn
from trainer_service.publish.publisher import Publisher
from trainer_service.runs.command import Answer, Command, Outcome, answer_of
from trainer_service.runs.pending import READING
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.service_metrics import TrainerMetrics
from trainer_service.settings import TrainerSettings
from trainer_service.usage import UsageLedger

_Method = Callable[[RunRecord, Command, Any, CommandProgress], Awaitable[Outcome]]
_log = get_logger(__name__)


class CommandExecutor:
    """Executes the commands of all runs, one method per RPC."""

    def __init__(
        self,
        settings: TrainerSettings,
        engine: EngineProcess,
        registry: RunRegistry,
        checkpoints: CheckpointStore,
        publisher: Publisher,
        guard: DiskGuard,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._registry = registry
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._guard = guard
        self._limits = InputLimits(engine.describe, settings.max_datums)
        self._methods: dict[str, _Method] = {
            "ForwardBackward": self._forward_backward,
            "OptimStep": self._optim_step,
            "SaveCheckpoint": self._save_checkpoint,
            "LoadCheckpoint": self._load_checkpoint,
            "PublishWeights": self._publish_weights,
        }

    async def check(self, run: RunRecord, command: Command) -> Command:
        """Decode and check a command on arrival, as far as the command and the free bytes of the journal allow.

        A valid command is returned with its content, an invalid one without its request. It
        keeps its place in the run's order and answers with the reason for its refusal at its turn.
        """
        if command.content is not None:
            return command
        try:
            command = command.decoded(await decoded(command.size, input_of, command.request, self._limits))
            if command.method == "ForwardBackward":
                self._guard.check_quota(run.tenant, command.size)
        except errors.Unavailable:
            return command  # the model's limits are not known yet
        except errors.PacelineError as error:
            return command.refused(error)
        return command

    async def execute(self, run: RunRecord, command: Command, progress: CommandProgress) -> Outcome:
        """Execute a command. Raises PacelineError."""
        if command.refusal is not None:
            raise command.refusal
        if run.state is RunState.LOST and command.method != "LoadCheckpoint":
            raise run.lost_error((await self._checkpoints.newest_states.find_if_readable(run.run_id)).path)
        content = command.content
        if content is None:
            content = await decoded(command.size, input_of, command.request, self._limits)
        return await self._methods[command.method](run, command, content, progress)

    async def _forward_backward(self, run: RunRecord, command: Command, asked: Pass, __: CommandProgress) -> Outcome:
        """Compute a loss and, unless `forward_only`, add its gradient to the run's."""
        output = await self._engine.forward_backward(run.run_id, asked.data, asked.spec)
        run.gradient_tokens = output.gradient_tokens
        reply = await decoded(command.size, _reply_of, output)
        return Outcome(reply, figures={"time/wait": output.waited_milliseconds})

    async def _optim_step(self, run: RunRecord, command: Command, asked: Step, progress: CommandProgress) -> Outcome:
        """Apply the accumulated gradient, or discard it."""
        if asked.only_if_succeeded_since and not progress.is_replay:
            _check_passes(run, asked.only_if_succeeded_since, command.seq_id)
        if asked.params is None:
            discarded = await self._engine.discard_gradient(run.run_id)
            run.gradient_tokens = 0
            return Outcome(pb.OptimStepResponse(step=run.step, tokens=discarded))
        try:
            output = await self._engine.optim_step(run.run_id, asked.params)
        except errors.NonFiniteGradient:
            run.gradient_tokens = 0  # it was dropped
            raise
        run.step, run.gradient_tokens = output.step, 0
        reply = pb.OptimStepResponse(
            step=output.step,
            grad_norm=output.grad_norm,
            learning_rate=output.learning_rate,
            tokens=output.tokens,
            milliseconds=output.milliseconds,
        )
        memory = {"memory/peak": float(output.peak_bytes), "memory/gpu": float(output.gpu_bytes)}
        return Outcome(reply, figures={name: size for name, size in memory.items() if size})

    async def _save_checkpoint(
        self, run: RunRecord, command: Command, asked: Save, progress: CommandProgress
    ) -> Outcome:
        """Write a durable checkpoint; keep the one that this command wrote before a crash.

        The run continues once its state is captured; its checkpoints appear in the order of its commands. Raises
        DiskFull before it starts if too few bytes would remain free, or later if the disk fills up anyway, and
        QuotaExceeded if the tenant has too many bytes on the volume. In either case the run is unchanged.
        """
        checkpoint = await self._checkpoints.find_made_by(asked.path, command.seq_id)
        if checkpoint is None:
            checkpoint = await self._write_checkpoint(run, asked, command.seq_id, progress)
        if asked.path.kind is CheckpointKind.STATE:
            await self._registry.persist_if_possible(run)
        _log.info("checkpoint saved", path=checkpoint.path, bytes=checkpoint.size_bytes)
        return Outcome(pb.SaveCheckpointResponse(checkpoint=checkpoint_to_proto(checkpoint)))

    async def _write_checkpoint(
        self, run: RunRecord, asked: Save, seq_id: int, progress: CommandProgress
    ) -> Checkpoint:
        path = asked.path
        size = run.state_bytes(path.kind)
        self._guard.check_free(self._settings.checkpoint_dir, size)

        async def write(directory: Path) -> None:
            save = self._engine.save_state if path.kind is CheckpointKind.STATE else self._engine.save_adapter
            await save(run.run_id, directory, progress.capture)
            progress.release()

        replaced = layout.Volume(self._settings.checkpoint_dir).checkpoint(path)
        with self._guard.reserve(run.tenant, size, replaced):
            return await self._checkpoints.save(
                path,
                write,
                base_model=run.base_model,
                base_sha256=run.base_sha256,
                tenant=run.tenant,
                step=run.step,
                seq_id=seq_id,
                ttl_seconds=asked.ttl_seconds,
                overwrite=asked.overwrite,
                wait_for_earlier=progress.wait_for_earlier,
            )

    async def _load_checkpoint(
        self, run: RunRecord, command: Command, asked: Load, progress: CommandProgress
    ) -> Outcome:
        """Replace the run's weights and, with `with_optimizer`, all of its state.

        Also restores a run whose state was lost. The loaded files are kept for the replay of this command, because the
        checkpoint may be deleted or overwritten before then. Raises DiskFull if the volume is too full for them or for
        versions that the run published before, or Internal if the volume fails to take one; the run is then unchanged.
        """
        path, with_optimizer = asked.path, asked.with_optimizer
        directory = run.snapshots.pinned(command.seq_id)
        if directory is not None:
            if not progress.is_replay:  # a crash may have come before its name was synced
                await asyncio.to_thread(layout.sync_directory, directory.parent)
            await self._checkpoints.check(directory, path.kind)
        else:

            async def take(target: Path) -> None:
                await self._checkpoints.link_into(path, Identity(command.tenant), target)

            directory = await run.snapshots.pin(command.seq_id, take)
        try:
            await self._load_directory(run, directory, progress, with_optimizer=with_optimizer)
        except errors.EngineUnavailable:
            raise  # it executes again
        except Exception:
            if not progress.is_replay:
                with suppress(OSError):  # it is removed with the journal then
                    await asyncio.to_thread(run.snapshots.drop_pin, command.seq_id)
            raise
        await self._registry.persist_if_possible(run)
        _log.info("checkpoint loaded", path=str(path), run=run.run_id, with_optimizer=with_optimizer)
        newest = await self._checkpoints.newest_states.find_if_readable(run.run_id)
        return Outcome(
            pb.LoadCheckpointResponse(
                run=run_to_proto(run.public(newest.path, self._guard.run_bytes(run.run_id), command.seq_id))
            )
        )

    async def _load_directory(
        self, run: RunRecord, directory: Path, progress: CommandProgress, *, with_optimizer: bool
    ) -> None:
        """Load the files that are kept for the command, once what was published before is on the volume."""
        if isinstance(run.parameters, LoraConfig):
            made_on = (await asyncio.to_thread(weights.read_manifest, directory)).base_sha256
            check_same_base(self._engine.describe().weights_sha256, made_on, "the checkpoint was made on")
        if not progress.is_replay:
            # Replays start at this command, so versions published before it cannot be remade.
            try:
                await self._publisher.settled(run.run_id)
            except OSError as error:
                message = f"the checkpoint volume does not take a version that was published before ({error.strerror})"
                raise errors.Internal(f"{message}; mend it and load again") from error
        is_new = not run.in_engine
        if is_new:
            await self._engine.create_run(run.run_id, run.parameters)
        try:
            loaded = await self._engine.load_state(run.run_id, directory, with_optimizer=with_optimizer)
        except errors.PacelineError as error:
            if is_new:
                await self._engine.delete_run(run.run_id)
            if isinstance(error, errors.CheckpointMismatch):
                error.field = "path"  # the engine gets a directory, and does not know how it was named
            raise
        run.step, run.gradient_tokens = loaded.step, loaded.gradient_tokens
        run.in_engine, run.state = True, RunState.READY

    async def _publish_weights(
        self, run: RunRecord, command: Command, asked: Publish, progress: CommandProgress
    ) -> Outcome:
        """Publish the run's weights as its next version; reuse the one that this command made before a crash.

        The run continues once its weights are captured. Raises NotServable, DiskFull or QuotaExceeded before anything
        is started. If it fails for good before it takes a number, one is left out: it may have been announced before a
        crash.
        """
        number, size = run.next_version, run.state_bytes(CheckpointKind.SAMPLER)
        try:
            published = await self._publisher.publish(
                run, seq_id=command.seq_id, durable=asked.durable, size=size, progress=progress
            )
        except errors.EngineUnavailable:
            raise  # it executes again
        except Exception:
            if run.next_version == number:
                self._publisher.skip_version(run)
            raise
        try:
            answer: Answer = await self._publisher.confirm(
                published, durable=asked.durable, policy=asked.policy, ack_seconds=asked.ack_seconds
            )
        except Exception as error:
            answer = answer_of(command, error)  # the version exists, and is recorded with the refusal
        model = published.manifest.model
        return Outcome(answer, model.version, model.blake3)


def _check_passes(run: RunRecord, since: int, until: int) -> None:
    """Check that each ForwardBackward from `since` to before `until` has succeeded. Raises PrecedingRefused.

    A command whose answer is not known may have been one that was refused: the run was lost and restored after it.
    """
    for seq_id in range(since, until):
        answer = run.sequencer.answers.get(seq_id)
        if answer is None and not run.sequencer.is_pending_read(seq_id):
            what = "is not known to have succeeded"
        elif answer is not None and answer.method == "ForwardBackward" and answer.failure is not None:
            what = f"was refused ({answer.failure.reason})"
        else:
            continue
        message = (
            f"command {seq_id} {what}, so the step was not taken. If other passes succeeded, their gradient waits: "
            "drop it with discard_gradient, or step without this condition"
        )
        raise errors.PrecedingRefused(message, field="only_if_succeeded_since", metadata={"seq_id": str(seq_id)})


def _reply_of(output: ForwardBackwardOutput) -> pb.ForwardBackwardResponse:
    outputs = [codec.output_to_proto(datum) for datum in output.loss_fn_outputs]
    return pb.ForwardBackwardResponse(outputs=outputs, metrics=output.metrics)


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """When to snapshot a run: after as much work as a replay may take, or as many bytes as its journal may hold."""

    commands: int
    journal_bytes: int
    seconds: float


class RunExecutor:
    """Executes the commands of one run in the engine, and takes snapshots of the run between them."""

    def __init__(
        self,
        run: RunRecord,
        executor: CommandExecutor,
        engine: EngineProcess,
        publisher: Publisher,
        policy: SnapshotPolicy,
        failpoints: Failpoints,
        foreground: Foreground,
        metrics: TrainerMetrics,
        recorder: Recorder,
        usage: UsageLedger,
    ) -> None:
        self.counters = run.counters
        self._usage = usage
        self._metrics = metrics
        self._recorder = recorder
        self._foreground = foreground
        self._run = run
        self._executor = executor
        self._engine = engine
        self._publisher = publisher
        self._policy = policy
        self._failpoints = failpoints
        self._commands = 0
        self._bytes = run.sequencer.journal.appended_bytes
        self._seconds = 0.0
        self._snapshot: asyncio.Task[None] | None = None

    def count(self, replayed: int) -> None:
        """Count replayed commands towards the next snapshot: the next startup would replay them too."""
        self._commands += replayed

    async def execute(self, command: Command, progress: CommandProgress) -> Outcome:
        start, step = perf_counter(), self._run.step
        if command.arrived_at is not None:
            self._metrics.waited(self._run.tenant, start - command.arrived_at)
            tracing.record("wait", command.arrived_at, start, command.trace)
        # A command that only reads may wait for samplers or for the disk, without the engine.
        is_computing = nullcontext() if command.method in READING else self._foreground.working()
        try:
            with is_computing, tracing.continued(command.trace), self._span(command) as span:
                outcome = await self._executor.execute(self._run, command, progress)
                span.set(step=self._run.step, version=outcome.version)
        except errors.NonFiniteGradient:
            self._recorder.dropped_gradient(self._run)
            raise
        finally:
            end = perf_counter()
            self._seconds += end - start
            self._run.unsaved_seconds += end - start
            self._metrics.executed(command.method, end - start)
        if isinstance(outcome.answer, pb.ForwardBackwardResponse):
            self._usage.passed(self._run, command.seq_id, outcome.answer)
        self._recorder.executed(self._run, outcome, Turn(command.seq_id, step, start, end))
        return outcome

    def _span(self, command: Command) -> AbstractContextManager[tracing.Span]:
        return tracing.span(command.method, run=self._run.run_id, seq_id=command.seq_id, bytes=command.size)

    def abandon(self, command: Command) -> None:
        if command.method == "PublishWeights":
            self._publisher.skip_version(self._run)

    async def executed(self, command: Command) -> None:
        self._commands += 1
        is_idle = self._snapshot is None or self._snapshot.done()
        if is_idle and self._is_due() and self._run.state is RunState.READY:
            self._failpoints.hit("before_snapshot")
            captured = asyncio.Event()
            with tracing.continued(command.trace):
                self._snapshot = asyncio.create_task(self._save(command.seq_id, captured))
            await captured.wait()

    async def save(self, seq_id: int) -> None:
        await self.close()
        if self._commands and self._run.state is RunState.READY:
            await self._save(seq_id, asyncio.Event())

    async def close(self) -> None:
        if self._snapshot is not None:
            await asyncio.wait({self._snapshot})

    def _is_due(self) -> bool:
        return (
            self._commands >= self._policy.commands
            or self._run.sequencer.journal.appended_bytes - self._bytes >= self._policy.journal_bytes
            or self._seconds >= self._policy.seconds
        )

    async def _save(self, seq_id: int, captured: asyncio.Event) -> None:
        """Save a snapshot and, once it is durable, remove what only a longer replay would need.

        It is completed when every command up to `seq_id` is answered and every version that they published is on the
        volume: until then one of them may have to execute again.
        """
        sequencer, snapshots, covered = self._run.sequencer, self._run.snapshots, self._run.unsaved_seconds
        self._commands, self._seconds, self._bytes = 0, 0.0, sequencer.journal.appended_bytes
        place = self._run.counters()

        async def write(directory: Path) -> tuple[Counters, list[AnswerRecord]]:
            await self._engine.save_state(self._run.run_id, directory, captured.set)
            await sequencer.answered(seq_id, self)
            await self._publisher.settled(self._run.run_id)
            return self._run.counters().at(place), [answer for answer in sequencer.answers if answer.seq_id <= seq_id]

        try:
            await sequencer.journal.rotate()
            with tracing.span("snapshot", run=self._run.run_id, seq_id=seq_id):
                await snapshots.save(seq_id, self._run.state_bytes(CheckpointKind.STATE), write)
            self._run.unsaved_seconds -= covered
            first_kept = await sequencer.journal.drop(await asyncio.to_thread(snapshots.drop_old))
            await asyncio.to_thread(snapshots.unpin, first_kept)
        except (errors.PacelineError, OSError) as error:
            self._metrics.snapshot_failures.inc()
            _log.warning("snapshot not saved; the journal is kept", run=self._run.run_id, error=str(error))
        finally:
            captured.set()
