"""The trainer service, put together: starts the engine and restarts it when it died, and expires checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import grpc
from prometheus_client import CollectorRegistry, Gauge

from paceline import errors, layout
from paceline.background import Background
from paceline.base_model.base_weights import base_weights_sha256
from paceline.files.folder_lock import FolderInUse, FolderLock
from paceline.log import get_logger
from paceline.metrics.v1.metrics_service_pb2_grpc import add_MetricsServiceServicer_to_server
from paceline.requests.tenant_limits import HeardLimits
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.interceptors import AroundInterceptor, CredentialInterceptor
from paceline.rpc.quota_metrics import add_quota_metrics
from paceline.rpc.server import Readiness
from paceline.steady_clock import SteadyClock
from paceline.trainer.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from paceline.types import ModelCertificate, ModelInfo, RunState
from trainer_service.backoff import backoff
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.commands import CommandExecutor, SnapshotPolicy
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.shared_base_watch import SharedBaseWatch
from trainer_service.engine_link.watchdog import Patience
from trainer_service.failpoints import Failpoints
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.limits.gates import ByteGate
from trainer_service.metrics.recorder import Recorder
from trainer_service.metrics.store import MetricsStore
from trainer_service.publish.agreements import Agreements
from trainer_service.publish.process_group import BroadcastGroup, GroupOptions
from trainer_service.publish.publisher import Publisher
from trainer_service.publish.watch_hub import WatchHub
from trainer_service.quotas import Quotas
from trainer_service.recovery import Recovery
from trainer_service.rpc.calls_in_progress import CallsInProgress
from trainer_service.rpc.download_limit import DownloadLimit
from trainer_service.rpc.metrics_servicer import MetricsServicer
from trainer_service.rpc.trainer_servicer import TrainerServicer
from trainer_service.rpc.weight_servicer import WeightServicer
from trainer_service.run_lifecycle import RunLifecycle
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.storage import RunStorage
from trainer_service.service_metrics import (
    TrainerMetrics,
    add_certificate_metrics,
    add_disk_metrics,
    add_run_metrics,
    add_watch_metrics,
)
from trainer_service.settings import TrainerSettings
from trainer_service.text import read_tokenizer_files
from trainer_service.uploads import AdapterUploads
from trainer_service.usage import UsageLedger
from trainer_service.volume_files import check_volume

_log = get_logger(__name__)

_CLOCK_FILE = "clock.json"
"""On the volume: how far the times to live of its checkpoints have come."""
_USE_SECONDS = 30.0
"""How often it is written when runs were used."""
_USAGE_SECONDS = 2.0
"""How often the counts of what tenants train are written."""
_RESTART_SECONDS, _MAX_RESTART_SECONDS = 1.0, 30.0
"""Delay between attempts to restart the engine: initial and maximum."""


class TrainerService:
    """Owns the engine process and everything that outlives it."""

    name = "trainer"
    service_names: Sequence[str] = (
        "paceline.trainer.v1.TrainerService",
        "paceline.weights.v1.WeightService",
        "paceline.metrics.v1.MetricsService",
    )

    def __init__(self, settings: TrainerSettings, metrics: CollectorRegistry) -> None:
        self._settings = settings
        self._volume = layout.Volume(settings.checkpoint_dir)
        self._metrics = TrainerMetrics(metrics)
        failpoints = Failpoints(settings.failpoints)
        self._tenants = tenants = HeardLimits()
        waiting_bytes = WaitingBytes(settings.max_waiting_bytes, settings.max_waiting_bytes_per_tenant, tenants=tenants)
        self._guard = guard = DiskGuard(
            settings.min_free_bytes, self._volume, settings.max_volume_bytes_per_tenant, tenants
        )
        storage = RunStorage(self._volume, settings, failpoints, waiting_bytes, guard)
        self._registry = RunRegistry(self._volume, storage, guard)
        self._quotas = Quotas(settings.max_runs_per_tenant, self._registry, guard, waiting_bytes, tenants)
        add_quota_metrics(self.name, self._quotas.tenants, self._quotas.of, metrics)
        self._clock = SteadyClock()
        self._checkpoints = CheckpointStore(self._volume, failpoints, guard, self._clock)
        self._row_store = MetricsStore(
            self._volume, guard, metrics, settings.metrics_max_bytes_per_run, settings.rollouts_max_bytes_per_run
        )
        self._recorder = Recorder(self._row_store)
        self._usage = UsageLedger(self._volume.root, metrics)
        self._hub = WatchHub()
        add_watch_metrics(self._hub, metrics)
        self._hub.on_acknowledged = lambda run_id, version: self._recorder.acknowledged(run_id, version, perf_counter())
        group = GroupOptions(settings.group_listen, settings.group_backend, settings.group_seconds)
        self._group = BroadcastGroup(group, self._hub)
        self._engine = EngineProcess(
            settings.engine_options(),
            on_exit=self._engine_exited,
            patience=Patience(settings.engine_silence_seconds, settings.engine_stall_seconds),
        )
        add_certificate_metrics(self._engine.describe, metrics)
        self._base = SharedBaseWatch(settings.base_dir)
        self._agreements = Agreements(self._engine, self._find_version, metrics)
        self._agreements.on_compared = self._recorder.compared
        self._publisher = Publisher(
            self._engine,
            self._registry,
            self._hub,
            self._volume,
            settings.staging_dir,
            settings.keep_versions,
            failpoints,
            self._group,
            guard,
            self._agreements,
        )
        self._commands = CommandExecutor(
            settings, self._engine, self._registry, self._checkpoints, self._publisher, guard
        )
        self._background = Background("the trainer's own work failed")
        self._recovery = Recovery(
            self._engine,
            storage,
            self._publisher,
            self._commands,
            SnapshotPolicy(settings.snapshot_commands, settings.snapshot_bytes, settings.snapshot_seconds),
            ByteGate(settings.max_replay_bytes),
            failpoints,
            self._background.spawn,
            self._checkpoints,
            self._registry,
            self._metrics,
            self._recorder,
            self._usage,
        )
        self._publisher.on_missing = self._recovery.ask
        self._lifecycle = RunLifecycle(
            settings.max_runs_per_tenant,
            self._engine,
            self._registry,
            self._checkpoints,
            self._publisher,
            self._recovery.start,
            self._recorder,
            tenants,
        )
        self._calls = CallsInProgress()
        self._readiness: Readiness | None = None
        self._lock: FolderLock | None = None
        self._tokenizer_files: Mapping[str, bytes] = {}
        self._restarting = False
        add_run_metrics(self._registry, settings.snapshot_seconds, metrics)
        add_disk_metrics(settings, metrics)
        Gauge(
            "paceline_trainer_group_members", "Samplers in the process group of the bridge collective", registry=metrics
        ).set_function(self._group.count)

    def interceptors(self) -> Sequence[AroundInterceptor]:
        downloads = DownloadLimit(self._settings.max_downloads_per_tenant)
        return (CredentialInterceptor(self._settings.secret, self._tenants), self._calls, downloads)

    async def start(self, readiness: Readiness) -> None:
        self._readiness = readiness
        check_volume(self._volume.root)
        self._lock = _lock_volume(self._volume.root)
        self._clock.resume(self._volume.root / _CLOCK_FILE, counts_downtime=True)
        await self._registry.restore()
        await asyncio.to_thread(self._usage.load, list(self._registry))
        for run in self._registry:
            if run.state is RunState.LOST:
                await self._recovery.offer_snapshot(run)
        self._publisher.start()
        model = await self._load_engine(self._engine.start)
        # The files of a model from the hub are present only after the engine has loaded it.
        self._engine.base_sha256 = await asyncio.to_thread(base_weights_sha256, self._settings.model)
        self._log_ready(model)
        # Read once, at startup: resolving a model's name may query the hub, which no caller may trigger.
        self._tokenizer_files = await asyncio.to_thread(read_tokenizer_files, self._settings.model)
        self._background.spawn(self._watch_base())
        self._background.spawn(self._recovery.recover_all())
        self._background.spawn(self._expire_checkpoints())
        self._background.spawn(self._group.run())
        self._background.spawn(self._write_uses())
        self._background.spawn(self._write_usage())

    def register(self, server: grpc.aio.Server) -> None:
        trainer = TrainerServicer(
            self._settings,
            self._lifecycle,
            self._commands,
            self._engine,
            self._registry,
            self._checkpoints,
            self._agreements,
            self._quotas,
            self._tokenizer_files,
            self._recovery.ask,
            self._hub,
            AdapterUploads(self._checkpoints, self._guard, self._settings.reader_seconds),
            self._usage,
        )
        add_TrainerServiceServicer_to_server(trainer, server)
        weights = WeightServicer(
            self._hub,
            self._group,
            self._publisher,
            self._registry,
            self._checkpoints,
            self._engine.describe,
            self._agreements,
        )
        weights.register(server)
        add_MetricsServiceServicer_to_server(MetricsServicer(self._registry, self._row_store, self._recorder), server)

    def drain(self) -> None:
        """Refuse commands that have not started, and end the watches after the other calls."""
        self._registry.drain()
        self._row_store.drain()
        self._background.spawn(self._end_watches())

    async def stop(self) -> None:
        self._readiness = None  # an engine that dies from now on is not replaced
        await self._background.close()
        await self._registry.save()
        await self._registry.persist_uses()
        await self._publisher.stop()
        await self._engine.close()
        await self._registry.close()
        await self._row_store.close()
        await asyncio.to_thread(self._usage.write)
        if self._lock is not None:
            self._lock.close()

    async def _end_watches(self) -> None:
        # Not earlier: a publish in progress waits for acknowledgements, which arrive on the watches.
        await self._calls.finished()
        self._hub.close()

    def _find_version(self, run: RunRecord, version: int) -> Path:
        return self._publisher.find(run, version)

    def _log_ready(self, model: ModelInfo) -> None:
        found = model.certificate
        _log.info(
            "engine ready",
            model=model.name,
            dtype=model.dtype,
            pid=self._engine.pid,
            weights_sha256=self._engine.base_sha256,
            **({} if found is None else _certificate_fields(found)),
        )
        if found is not None and found.reason:
            _log.warning("sequences do not share passes", model=model.name, reason=found.reason)

    def _engine_exited(self, status: int) -> None:
        _log.error("engine died", status=status)
        self._engine_lost()

    def _engine_lost(self) -> None:
        self._registry.hold_all()
        if not self._restarting:
            self._restarting = True
            self._background.spawn(self._restart_engine())

    async def _watch_base(self) -> None:
        """Stop the engine when the sampler that lends its base weights ends; restart it on the next one's weights."""
        while True:
            await self._base.wait_gone()
            if self._restarting:
                await asyncio.sleep(_RESTART_SECONDS)
                continue
            _log.error("the sampler that lends the base weights is gone; the engine waits for the next one")
            await self._engine.close()
            self._engine_lost()

    async def _load_engine(self, load: Callable[[], Awaitable[ModelInfo]]) -> ModelInfo:
        """Start the engine process once base weights are available for it."""
        while True:
            await self._base.wait_available()
            with suppress(errors.BaseUnavailable):
                return await load()

    async def _restart_engine(self) -> None:
        if self._readiness is None:
            return
        await self._readiness.set(False)
        model = await self._retry_restart()
        self._metrics.engine_restarts.inc()
        self._restarting = False
        self._log_ready(model)
        await self._readiness.set(True)
        await self._recovery.recover_all()

    async def _retry_restart(self) -> ModelInfo:
        """Restart the engine, retrying without limit: the cause of a failure may be temporary."""
        failures = 0
        while True:
            try:
                return await self._load_engine(self._engine.restart)
            except Exception as error:
                failures += 1
                seconds = backoff(failures, _RESTART_SECONDS, _MAX_RESTART_SECONDS)
                _log.warning("engine not started; retrying", error=repr(error), failures=failures, seconds=seconds)
            await asyncio.sleep(seconds)

    async def _write_usage(self) -> None:
        while True:
            await asyncio.sleep(_USAGE_SECONDS)
            await asyncio.to_thread(self._usage.write)

    async def _write_uses(self) -> None:
        while True:
            await asyncio.sleep(_USE_SECONDS)
            await self._registry.persist_uses()

    async def _expire_checkpoints(self) -> None:
        """Delete checkpoints past their time to live, in an endless loop."""
        while True:
            await asyncio.sleep(self._settings.expiry_check_seconds)
            try:
                await asyncio.to_thread(self._clock.save)
                for path in await self._checkpoints.delete_expired():
                    _log.info("checkpoint expired", path=path)
            except OSError as error:  # affects the whole volume, for example no free descriptors
                _log.error("expiring checkpoints failed; retrying", error=str(error))


def _certificate_fields(certificate: ModelCertificate) -> dict[str, str | float]:
    """Return a certificate's fields for the log."""
    return {
        "packing": certificate.packing.name,
        "attention": certificate.attention,
        "logprob_difference": certificate.logprob_difference,
        "logprob_bound": certificate.logprob_bound,
        "gradient_difference": certificate.gradient_difference,
        "gradient_bound": certificate.gradient_bound,
        "check_seconds": certificate.seconds,
    }


def _lock_volume(root: Path) -> FolderLock:
    """Lock the volume until the process ends: two trainers on one volume would overwrite each other's runs.

    Raises InvalidArgument if another one uses it.
    """
    root.mkdir(parents=True, exist_ok=True)
    try:
        return FolderLock(root)
    except FolderInUse as error:
        message = f"{root} is used by another trainer ({error}); end that one, or give this one its own"
        raise errors.InvalidArgument(message, field="checkpoint_dir") from None
