"""The trainer's operations in domain types: what each command does to a run, and which run states allow it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from paceline import errors, layout, weights
from paceline.background import Background, uninterrupted
from paceline.base_weights import check_same_base
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.rpc.identity import Identity
from paceline.types import (
    Checkpoint,
    CheckpointKind,
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardSpec,
    LoraConfig,
    OptimizerParams,
    OptimStepOutput,
    RunParameters,
    RunState,
)
from trainer_service import validation
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.engine.client import EngineProcess
from trainer_service.engine.optimizers.specs import spec_of
from trainer_service.engine.protocol import AdapterInfo
from trainer_service.limits.free_space import DiskGuard
from trainer_service.limits.volume_bytes import VolumeBytes
from trainer_service.publish.publisher import Publication, Publisher
from trainer_service.publish.watch_hub import AckPolicy
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry, lost
from trainer_service.settings import TrainerSettings

_KNOWN_CLIENTS = 64
"""Newest AttachRun requests of a run that are recognised when they are repeated."""

_log = get_logger(__name__)


class Trainer:
    """Executes commands. The sequencer handles ordering and repetition; here each call executes the command once."""

    def __init__(
        self,
        settings: TrainerSettings,
        engine: EngineProcess,
        registry: RunRegistry,
        checkpoints: CheckpointStore,
        publisher: Publisher,
        start_run: Callable[[RunRecord, int], None],
        guard: DiskGuard,
        volume_bytes: VolumeBytes,
    ) -> None:
        """`start_run` starts a new run's commands, given the number of engines lost before the run's own."""
        self._settings = settings
        self._engine = engine
        self._registry = registry
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._start_run = start_run
        self._guard = guard
        self._volume_bytes = volume_bytes
        self._creating = asyncio.Lock()
        self._changes = Background("change of a run not finished")

    @uninterrupted  # otherwise a cancelled call would remove the folder while a thread still writes the run's file
    async def create_run(
        self,
        identity: Identity,
        request_id: str,
        digest: bytes,
        base_model: str,
        parameters: RunParameters | CheckpointPath,
        user_metadata: Mapping[str, str],
    ) -> RunRecord:
        """Create a run, or return the one that the same request created.

        A checkpoint as `parameters` means the configuration of its run. Raises RequestIdReused if another request used
        the request_id.
        """
        validation.check_request_id(request_id)
        async with self._creating:
            made = self._registry.find_request(identity.tenant, request_id)
            known = made.request_digest if made else self._registry.find_deleted(identity.tenant, request_id)
            if known and known != digest.hex():
                raise errors.RequestIdReused("was used with another payload; make a new one", field="request_id")
            if known and made is None:
                raise errors.RunNotFound("the run that this request made was deleted", field="request_id")
            if made is not None:
                return made
            if isinstance(parameters, CheckpointPath):
                self._checkpoints.find(parameters, identity, "like_checkpoint")
                origin = await self._registry.origin(parameters.run_id)
                base_model, user_metadata = base_model or origin.base_model, user_metadata or origin.user_metadata
                parameters = origin.parameters
            self._check_run(base_model, parameters, user_metadata)
            return await self._make_run(identity, request_id, digest, parameters, user_metadata)

    def _check_run(self, base_model: str, parameters: RunParameters, user_metadata: Mapping[str, str]) -> None:
        model = self._engine.describe()
        if base_model not in {"", model.name}:
            raise errors.ModelNotFound(f"no such base model; {model.name} is served", field="base_model")
        if isinstance(parameters, LoraConfig):
            validation.check_lora(parameters, model)
        validation.check_user_metadata(user_metadata)

    async def _make_run(
        self,
        identity: Identity,
        request_id: str,
        digest: bytes,
        parameters: RunParameters,
        user_metadata: Mapping[str, str],
    ) -> RunRecord:
        limit = self._settings.max_runs_per_tenant
        if len(self._registry.owned_by(identity)) >= limit:
            message = f"{limit} runs exist, as many as a tenant may have: delete one, or have the operator raise "
            facts = {"quota": "runs", "used": str(limit), "limit": str(limit)}
            raise errors.TooManyRuns(message + "max_runs_per_tenant", metadata=facts)
        run_id = layout.new_run_id()
        engines_lost = self._registry.engines_lost
        made = await self._engine.create_run(run_id, parameters)
        try:
            record = await self._add_run(run_id, identity, request_id, digest, parameters, user_metadata, made)
        except BaseException:
            with suppress(errors.EngineUnavailable):  # an engine that is down holds no runs
                await self._engine.delete_run(run_id)
            raise
        self._start_run(record, engines_lost)
        _log.info("run made", run=run_id, kind=type(parameters).__name__, parameters=made.trainable_parameters)
        return record

    async def _add_run(
        self,
        run_id: str,
        identity: Identity,
        request_id: str,
        digest: bytes,
        parameters: RunParameters,
        user_metadata: Mapping[str, str],
        made: AdapterInfo,
    ) -> RunRecord:
        async with self._registry.making(run_id, identity.tenant) as (sequencer, snapshots):
            record = RunRecord(
                run_id=run_id,
                tenant=identity.tenant,
                base_model=self._engine.describe().name,
                base_sha256=self._engine.describe().weights_sha256,
                parameters=parameters,
                create_time=datetime.now(UTC),
                trainable_parameters=made.trainable_parameters,
                request_id=request_id,
                request_digest=digest.hex(),
                sequencer=sequencer,
                snapshots=snapshots,
                user_metadata=dict(user_metadata),
                adapted_modules=made.modules,
            )
            await self._registry.add(record)
        return record

    async def attach(self, record: RunRecord, request_id: str) -> int:
        """Durably make a client the one that trains a run; return its number.

        A repetition of one of the newest requests returns the same number and supersedes nobody. Raises DiskFull, in
        which case nobody was superseded.
        """
        validation.check_request_id(request_id)
        if request_id not in record.attached:
            record.attachment += 1
            record.attached[request_id] = record.attachment
            for oldest in list(record.attached)[:-_KNOWN_CLIENTS]:
                del record.attached[oldest]
        attachment = record.attached[request_id]
        try:
            await self._registry.persist(record)
        except errors.DiskFull:
            record.attached.pop(request_id, None)
            raise
        record.sequencer.attach(max(attachment, record.sequencer.attachment))
        return attachment

    @uninterrupted
    async def delete_run(self, record: RunRecord, *, delete_checkpoints: bool) -> None:
        """Delete a run after its command in progress has ended; a publish stops waiting for acknowledgements."""
        async with record.recovering:
            if record.is_deleted:
                raise errors.RunNotFound("no such run", field="run_id")
            gone = errors.RunNotFound("the run was deleted", field="run_id")
            record.sequencer.drain(gone)
            await self._publisher.cancel_waits(record.run_id)
            await record.sequencer.close(gone)
            if record.in_engine:
                with suppress(errors.EngineUnavailable):  # an engine that is down holds no runs
                    await self._engine.delete_run(record.run_id)
            await self._publisher.forget(record)
            await self._registry.remove(record, keep_checkpoints=not delete_checkpoints)
        _log.info("run deleted", run=record.run_id)

    def check_room(self, record: RunRecord, size: int) -> None:
        """Raise QuotaExceeded unless the run's tenant may add `size` bytes of journal to the volume."""
        self._volume_bytes.check(record.tenant, size)

    def check_batch(self, data: Sequence[Datum], spec: ForwardBackwardSpec) -> ForwardBackwardSpec:
        """Check a batch; return its spec with the loss's defaults filled in."""
        return validation.check_batch(data, spec, self._engine.describe(), self._settings.max_datums)

    async def forward_backward(
        self, record: RunRecord, data: Sequence[Datum], spec: ForwardBackwardSpec
    ) -> ForwardBackwardOutput:
        """Compute a loss and, unless `forward_only`, add its gradient to the run's."""
        self._check_ready(record)
        return await self._engine.forward_backward(record.run_id, data, self.check_batch(data, spec))

    async def optim_step(self, record: RunRecord, params: OptimizerParams) -> OptimStepOutput:
        """Apply the accumulated gradient."""
        self._check_ready(record)
        spec_of(params).check(params)
        output = await self._engine.optim_step(record.run_id, params)
        record.step = output.step
        return output

    async def save_checkpoint(
        self,
        record: RunRecord,
        name: str,
        kind: CheckpointKind,
        *,
        seq_id: int,
        ttl_seconds: int | None,
        overwrite: bool,
        progress: CommandProgress,
    ) -> Checkpoint:
        """Write a durable checkpoint; keep the one that command `seq_id` wrote before a crash.

        The run continues once its state is captured; its checkpoints appear in the order of its commands. Raises
        DiskFull before it starts if too little room would remain, or later if the disk fills up anyway, and
        QuotaExceeded if the tenant has too many bytes on the volume. In either case the run is unchanged.
        """
        self._check_ready(record)
        path = CheckpointPath(record.run_id, kind, layout.check_name(name))
        checkpoint = await self._checkpoints.find_made_by(path, seq_id)
        if checkpoint is None:
            checkpoint = await self._write_checkpoint(record, path, seq_id, ttl_seconds, overwrite, progress)
        if kind is CheckpointKind.STATE:
            record.latest_state_checkpoint = checkpoint.path
            await self._registry.note(record)
        _log.info("checkpoint saved", path=checkpoint.path, bytes=checkpoint.size_bytes)
        return checkpoint

    async def _write_checkpoint(
        self,
        record: RunRecord,
        path: CheckpointPath,
        seq_id: int,
        ttl_seconds: int | None,
        overwrite: bool,
        progress: CommandProgress,
    ) -> Checkpoint:
        kind = path.kind
        self._guard.check(self._settings.checkpoint_dir, record.state_bytes(kind))

        async def write(directory: Path) -> None:
            save = self._engine.save_state if kind is CheckpointKind.STATE else self._engine.save_adapter
            await save(record.run_id, directory, progress.capture)
            progress.release()

        final = layout.Volume(self._settings.checkpoint_dir).checkpoint(path)
        with self._volume_bytes.taking(record.tenant, record.state_bytes(kind), replaced=final):
            return await self._checkpoints.save(
                path,
                write,
                base_model=record.base_model,
                base_sha256=record.base_sha256,
                tenant=record.tenant,
                step=record.step,
                seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                wait_for_earlier=progress.wait_for_earlier,
            )

    async def load_checkpoint(
        self, record: RunRecord, identity: Identity, path: CheckpointPath, *, seq_id: int, with_optimizer: bool
    ) -> None:
        """Replace the run's weights and, with `with_optimizer`, all of its state.

        Also restores a run whose state was lost. The loaded files are kept for the replay of command `seq_id`, because
        the checkpoint may be deleted or overwritten before then. Raises DiskFull if there is no room for them or for
        versions that the run published before; the run is then unchanged.
        """
        if with_optimizer and path.kind is not CheckpointKind.STATE:
            raise errors.CheckpointMismatch("a sampler checkpoint has no optimizer; load weights alone", field="path")
        directory = record.snapshots.pinned(seq_id)
        if directory is not None:
            await self._checkpoints.check(directory, path.kind)
        else:

            async def take(target: Path) -> None:
                await self._checkpoints.link_into(path, identity, target)

            directory = await record.snapshots.pin(seq_id, take)
        if isinstance(record.parameters, LoraConfig):
            made_on = (await asyncio.to_thread(weights.read_manifest, directory)).base_sha256
            check_same_base(self._engine.describe().weights_sha256, made_on, "the checkpoint was made on")
        # Replays start at this command, so versions published before it cannot be remade and must be on the volume.
        # Errors other than DiskFull are only logged.
        (unsettled,) = await asyncio.gather(self._publisher.settled(record.run_id), return_exceptions=True)
        if isinstance(unsettled, errors.DiskFull):
            raise unsettled
        fresh = not record.in_engine
        if fresh:
            await self._engine.create_run(record.run_id, record.parameters)
        try:
            loaded = await self._engine.load_state(record.run_id, directory, with_optimizer=with_optimizer)
        except errors.PacelineError:
            if fresh:
                await self._engine.delete_run(record.run_id)
            raise
        record.step, record.in_engine, record.state = loaded.step, True, RunState.READY
        await self._registry.note(record)
        _log.info("checkpoint loaded", path=str(path), run=record.run_id, with_optimizer=with_optimizer)

    async def publish(
        self,
        record: RunRecord,
        *,
        seq_id: int,
        durable: bool,
        policy: AckPolicy,
        ack_seconds: float,
        progress: CommandProgress,
    ) -> Publication:
        """Publish the run's weights as its next version; reuse the one that command `seq_id` made before a crash.

        The run continues once its weights are captured. Raises DiskFull or QuotaExceeded before anything is started, as
        `save_checkpoint` does.
        """
        self._check_ready(record)
        if not self._publisher.has_made(record, seq_id):
            self._guard.check(self._settings.checkpoint_dir, record.state_bytes(CheckpointKind.SAMPLER))
            self._volume_bytes.check(record.tenant, record.state_bytes(CheckpointKind.SAMPLER))
        return await self._publisher.publish(
            record, seq_id=seq_id, durable=durable, policy=policy, ack_seconds=ack_seconds, progress=progress
        )

    async def expire_checkpoints(self) -> None:
        """Delete checkpoints past their time to live, in an endless loop."""
        while True:
            await asyncio.sleep(self._settings.expiry_check_seconds)
            try:
                for path in await self._checkpoints.delete_expired(datetime.now(UTC)):
                    _log.info("checkpoint expired", path=path)
            except OSError as error:  # affects the whole volume, for example no free descriptors
                _log.error("checkpoints not expired; they are looked at again", error=str(error))

    @staticmethod
    def _check_ready(record: RunRecord) -> None:
        if record.state is RunState.LOST:
            raise lost(record)
