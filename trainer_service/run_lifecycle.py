"""Creates, attaches to and deletes runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import aclosing, suppress
from dataclasses import replace
from enum import Enum
from time import monotonic
from typing import cast

from paceline import errors, layout
from paceline.background import Background, uninterrupted
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.requests.tenant_limits import TenantLimits
from paceline.requests.user_metadata import check_user_metadata
from paceline.rpc.identity import Identity
from paceline.types import LoraConfig, RunParameters
from trainer_service import validation
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.engine_link.client import EngineProcess
from trainer_service.metrics.recorder import Recorder
from trainer_service.publish.publisher import Publisher
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.status import CommandStatus


class OutstandingPolicy(Enum):
    """What an attaching client wants done about commands that have not ended; the values are the contract's."""

    UNSPECIFIED = 0
    """The same as REPORT."""
    REPORT = 1
    WAIT = 2
    CANCEL = 3


_KNOWN_CLIENTS = 64
"""Newest AttachRun requests of a run that are recognised when they are repeated."""

_ONLY_SAVED = "so that it can be saved, but not published"

_log = get_logger(__name__)


class RunLifecycle:
    """Creates, attaches to and deletes runs; their commands are executed elsewhere."""

    def __init__(
        self,
        max_runs: int,
        engine: EngineProcess,
        registry: RunRegistry,
        checkpoints: CheckpointStore,
        publisher: Publisher,
        start_run: Callable[[RunRecord, int], None],
        recorder: Recorder,
        tenants: TenantLimits | None = None,
    ) -> None:
        """Let a tenant have up to `max_runs` runs, unless it is one of the `tenants` with a limit of their own.

        `start_run` starts a new run's commands, given the number of engines lost before the run's own.
        """
        self._max_runs = max_runs
        self._tenants = TenantLimits() if tenants is None else tenants
        self._engine = engine
        self._registry = registry
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._start_run = start_run
        self._recorder = recorder
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
        *,
        unembed_if_served: bool = False,
    ) -> RunRecord:
        """Create a run, or return the one that the same request created.

        With `unembed_if_served` it has no adapter on the output head if only that keeps all samplers from serving it. A
        checkpoint as `parameters` means the configuration of its run. Raises RequestIdReused if another request used
        the request_id.
        """
        validation.check_request_id(request_id, "run")
        # One at a time, so that a request that is repeated while the first one is served finds its run.
        async with self._creating:
            made = self._registry.find_request(identity.tenant, request_id)
            known = made.request_digest if made else self._registry.find_deleted(identity.tenant, request_id)
            if known and known != digest.hex():
                raise errors.RequestIdReused("was used with another payload; generate a new one", field="request_id")
            if known and made is None:
                raise errors.RunNotFound(
                    "the run that this request created was deleted; generate a new one for another run",
                    field="request_id",
                )
            if made is not None:
                return made
            if isinstance(parameters, CheckpointPath):
                self._checkpoints.find(parameters, identity, "like_checkpoint")
                origin = await self._registry.origin(parameters.run_id)
                base_model, user_metadata = base_model or origin.base_model, user_metadata or origin.user_metadata
                parameters = origin.parameters
            self._check(identity, base_model, parameters, user_metadata)
            return await self._create(
                identity, request_id, digest, parameters, user_metadata, unembed_if_served=unembed_if_served
            )

    def warnings(self, record: RunRecord, asked: RunParameters | CheckpointPath) -> list[str]:
        """Say what `asked` of a run was left out, and what keeps every watching sampler from serving the run."""
        found = list[str]()
        given = record.parameters
        if _trains_head(asked) and not _trains_head(given):
            found.append("the output head gets no adapter, as with train_unembed=False: no sampler serves one there")
        with suppress(errors.EngineUnavailable):
            if (obstacle := self._publisher.obstacle(given, record.adapted_modules)) is not None:
                found.append(f"no watching sampler can serve what the run trains, {_ONLY_SAVED}; {obstacle.message}")
        for warning in found:
            _log.warning("run not served as asked", run=record.run_id, tenant=record.tenant, warning=warning)
        return found

    def unserved_modules(self) -> Set[str]:
        """Return the modules of the base model on which none of the watching samplers serves an adapter."""
        return self._publisher.unserved_modules()

    def _check(
        self, identity: Identity, base_model: str, parameters: RunParameters, user_metadata: Mapping[str, str]
    ) -> None:
        model = self._engine.describe()
        validation.check_base_model(base_model, model)
        if isinstance(parameters, LoraConfig):
            validation.check_lora(parameters, model)
        check_user_metadata(user_metadata)
        used, limit = len(self._registry.owned_by(identity)), self._tenants.of(identity.tenant, "runs", self._max_runs)
        if limit and used >= limit:
            remedy = f"delete one, or have the operator raise {self._tenants.raised_by(identity.tenant, 'runs')}"
            message = f"{used} runs exist, and this tenant may have {limit}: {remedy}"
            metadata = {"quota": "runs", "used": str(used), "limit": str(limit)}
            raise errors.TooManyRuns(message, metadata=metadata)

    async def _create(
        self,
        identity: Identity,
        request_id: str,
        digest: bytes,
        parameters: RunParameters,
        user_metadata: Mapping[str, str],
        *,
        unembed_if_served: bool,
    ) -> RunRecord:
        run_id = layout.new_run_id()
        engines_lost = self._registry.engines_lost
        made = await self._engine.create_run(run_id, parameters)
        head_is_optional = unembed_if_served and _trains_head(parameters)
        if head_is_optional and self._publisher.serves_without_head(parameters, made.modules):
            await self._engine.delete_run(run_id)
            parameters = replace(cast("LoraConfig", parameters), train_unembed=False)
            made = await self._engine.create_run(run_id, parameters)
        try:
            async with self._registry.creating(run_id, identity.tenant) as (sequencer, snapshots):
                record = RunRecord(
                    run_id=run_id,
                    tenant=identity.tenant,
                    base_model=self._engine.describe().name,
                    base_sha256=self._engine.describe().weights_sha256,
                    parameters=parameters,
                    create_time=self._registry.next_create_time(),
                    trainable_parameters=made.trainable_parameters,
                    request_id=request_id,
                    request_digest=digest.hex(),
                    sequencer=sequencer,
                    snapshots=snapshots,
                    user_metadata=dict(user_metadata),
                    adapted_modules=made.modules,
                )
                await self._registry.add(record)
        except BaseException:
            with suppress(errors.EngineUnavailable):  # an engine that is down holds no runs
                await self._engine.delete_run(run_id)
            raise
        self._start_run(record, engines_lost)
        _log.info("run created", run=run_id, kind=type(parameters).__name__, parameters=made.trainable_parameters)
        return record

    @uninterrupted
    async def update(self, record: RunRecord, entries: Mapping[str, str], remove: Collection[str]) -> None:
        """Durably set and remove entries of a run's metadata.

        Raises InvalidArgument for an entry that is both set and removed, OutOfRange for more than a run may have,
        DiskFull or OSError; the metadata is then as before.
        """
        if both := sorted(entries.keys() & set(remove)):
            raise errors.InvalidArgument(f"{both[0]} is both set and removed; name it once", field="remove")
        async with record.persisting:  # also keeps two requests from undoing each other
            kept = {name: value for name, value in record.user_metadata.items() if name not in remove}
            metadata = {**kept, **entries}
            check_user_metadata(metadata, "set")
            await self._registry.write(record, user_metadata=metadata)
            record.user_metadata = metadata

    @uninterrupted
    async def attach(self, record: RunRecord, request_id: str) -> int:
        """Durably make a client the one that trains a run; return its number.

        A repetition of one of the newest requests returns the same number and supersedes nobody. Raises DiskFull or
        OSError, in which case nobody was superseded.
        """
        validation.check_request_id(request_id, "client that attaches")
        try:
            async with record.persisting:  # also keeps two requests from getting one number
                number = record.attached.get(request_id, record.attachment + 1)
                if request_id not in record.attached:
                    record.use()
                newest = max(number, record.attachment)
                attached = dict([*{**record.attached, request_id: number}.items()][-_KNOWN_CLIENTS:])
                await self._registry.write(record, attachment=newest, attached=attached)
                record.attachment, record.attached = newest, attached
                record.sequencer.attach(newest)
        except (errors.DiskFull, OSError):
            await self._registry.persist_if_possible(record)  # the client may be in the run's file or its copy already
            raise
        return number

    async def end_outstanding(
        self, record: RunRecord, attachment: int, policy: OutstandingPolicy, seconds: float
    ) -> list[CommandStatus]:
        """Do as `policy` says about the commands of earlier clients that have not ended; return what became of them.

        Waits at most `seconds`. Raises ClientSuperseded if another client has attached since, also while this one
        waits; DiskFull or EngineUnavailable if a cancellation cannot be written.
        """
        sequencer, until = record.sequencer, monotonic() + seconds
        sequencer.check_newest(attachment)
        is_report = policy in {OutstandingPolicy.UNSPECIFIED, OutstandingPolicy.REPORT}
        left = sequencer.left_to(attachment)
        outstanding = sorted(set(left).intersection(sequencer.outstanding))
        async with aclosing(sequencer.follow(outstanding)) as stream:
            if policy is OutstandingPolicy.CANCEL:
                await sequencer.cancel_waiting(attachment)
            async with aclosing(stream.statuses(0 if is_report else seconds)) as statuses:
                found = {status.seq_id: status async for status in statuses}
        if not is_report:
            await sequencer.taken(left, until - monotonic())
            sequencer.check_newest(attachment)  # what had not ended may have been that client's to decide about
        return list(found.values())

    @uninterrupted
    async def delete_run(self, record: RunRecord, *, delete_checkpoints: bool) -> None:
        """Delete a run after its command in progress has ended; a publish stops waiting for acknowledgements."""
        async with record.recovering:
            if record.is_deleted:
                raise errors.RunNotFound.of(record.run_id, field="run_id")
            gone = errors.RunNotFound.deleted("run_id")
            record.sequencer.drain(gone)
            await self._publisher.cancel_waits(record.run_id)
            await record.sequencer.close(gone)
            if record.in_engine:
                with suppress(errors.EngineUnavailable):  # an engine that is down holds no runs
                    await self._engine.delete_run(record.run_id)
            await self._publisher.forget(record)
            self._checkpoints.newest_states.forget(record.run_id)
            async with self._recorder.deleting(record.run_id):
                await self._registry.remove(record, keep_checkpoints=not delete_checkpoints)
        _log.info("run deleted", run=record.run_id)


def _trains_head(parameters: RunParameters | CheckpointPath) -> bool:
    return isinstance(parameters, LoraConfig) and parameters.train_unembed
