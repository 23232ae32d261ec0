"""The trainer service: builds its components and connects them."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry, Gauge

from paceline import errors, layout
from paceline.background import Background
from paceline.base_weights import base_weights_sha256
from paceline.log import get_logger
from paceline.rpc.interceptors import AroundInterceptor, CredentialInterceptor
from paceline.rpc.quota_metrics import QuotaMetrics
from paceline.rpc.server import Readiness
from paceline.trainer.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from paceline.types import ModelCertificate, ModelInfo, RunState
from paceline.waiting_bytes import WaitingBytes
from trainer_service.backoff import backoff
from trainer_service.certificate_metrics import CertificateMetrics
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.engine.client import EngineProcess
from trainer_service.engine.watchdog import Patience
from trainer_service.failpoints import Failpoints
from trainer_service.hardware import choose_options
from trainer_service.limits.byte_gate import ByteGate
from trainer_service.limits.free_space import DiskGuard
from trainer_service.limits.volume_bytes import VolumeBytes
from trainer_service.publish.agreements import Agreements
from trainer_service.publish.process_group import BroadcastGroup, GroupOptions
from trainer_service.publish.publisher import Publisher
from trainer_service.publish.watch_hub import WatchHub
from trainer_service.quotas import Quotas
from trainer_service.recovery.recovery import Recovery
from trainer_service.recovery.restore_point import RestorePoints
from trainer_service.rpc.command_handlers import Commands
from trainer_service.rpc.trainer_servicer import TrainerServicer
from trainer_service.rpc.weight_servicer import WeightServicer
from trainer_service.runs.executor import SnapshotPolicy
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.storage import RunStorage
from trainer_service.settings import TrainerSettings
from trainer_service.text.tokenizer_files import read_tokenizer_files
from trainer_service.trainer import Trainer
from trainer_service.volume.format import check_volume
from trainer_service.weight_sharing import LentBase

_log = get_logger(__name__)

_RESTART_SECONDS, _MOST_RESTART_SECONDS = 1.0, 30.0
"""Delay between attempts to restart the engine: initial and maximum."""


class TrainerService:
    """Owns the engine process and everything that outlives it."""

    name = "trainer"
    service_names: Sequence[str] = ("paceline.trainer.v1.TrainerService", "paceline.weights.v1.WeightService")

    def __init__(self, settings: TrainerSettings, metrics: CollectorRegistry) -> None:
        self._settings = settings
        self._volume = layout.Volume(settings.checkpoint_dir)
        failpoints = Failpoints(settings.failpoints)
        waiting_bytes = WaitingBytes(settings.max_waiting_bytes, settings.max_waiting_bytes_per_tenant)
        volume_bytes = VolumeBytes(self._volume, settings.max_volume_bytes_per_tenant)
        guard = DiskGuard(settings.min_free_bytes, volume_bytes)
        storage = RunStorage(self._volume, settings, failpoints, waiting_bytes, guard)
        self._registry = RunRegistry(self._volume, storage, volume_bytes)
        self._quotas = Quotas(settings.max_runs_per_tenant, self._registry, volume_bytes, waiting_bytes)
        QuotaMetrics(self.name, self._quotas.tenants, self._quotas.of, metrics)
        self._checkpoints = CheckpointStore(self._volume, failpoints, guard)
        self._restore_points = RestorePoints(self._volume, self._registry, self._checkpoints)
        self._hub = WatchHub()
        group = GroupOptions(settings.group_listen, settings.group_backend, settings.group_seconds)
        self._group = BroadcastGroup(group, self._hub)
        self._engine = EngineProcess(
            choose_options(settings),
            on_exit=self._engine_exited,
            patience=Patience(settings.engine_silence_seconds, settings.engine_stall_seconds),
        )
        CertificateMetrics(self._engine.describe, metrics)
        self._base = LentBase(settings.base_dir)
        self._agreements = Agreements(self._engine, self._find_version, metrics)
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
        self._trainer = Trainer(
            settings,
            self._engine,
            self._registry,
            self._checkpoints,
            self._publisher,
            self._start_run,
            guard,
            volume_bytes,
        )
        self._commands = Commands(self._trainer)
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
            self._restore_points,
            self._registry,
        )
        self._readiness: Readiness | None = None
        self._lock: int | None = None
        self._tokenizer_files: Mapping[str, bytes] = {}
        self._restarting = False
        Gauge("paceline_trainer_runs", "Runs", registry=metrics).set_function(lambda: len(list(self._registry)))
        Gauge("paceline_trainer_watchers", "Samplers that watch", registry=metrics).set_function(self._hub.count)
        Gauge(
            "paceline_trainer_group_members", "Samplers in the process group of the bridge collective", registry=metrics
        ).set_function(self._group.count)

    def interceptors(self) -> Sequence[AroundInterceptor]:
        return (CredentialInterceptor(self._settings.secret),)

    async def start(self, readiness: Readiness) -> None:
        self._readiness = readiness
        check_volume(self._volume.root)
        self._lock = _lock_volume(self._volume.root)
        await self._registry.restore()
        for run in self._registry:
            if run.state is RunState.LOST:
                await self._restore_points.offer(run)
        self._publisher.start()
        model = await self._load_engine(self._engine.start)
        # The files of a model from the hub are present only after the engine has loaded it.
        self._engine.base_sha256 = await asyncio.to_thread(base_weights_sha256, self._settings.model)
        self._log_ready(model)
        # Read once, at startup: resolving a model's name may query the hub, which no caller may trigger.
        self._tokenizer_files = await asyncio.to_thread(read_tokenizer_files, self._settings.model)
        self._background.spawn(self._watch_base())
        self._background.spawn(self._recovery.recover_all(self._registry))
        self._background.spawn(self._trainer.expire_checkpoints())
        self._background.spawn(self._group.run())

    def register(self, server: grpc.aio.Server) -> None:
        trainer = TrainerServicer(
            self._settings,
            self._trainer,
            self._commands,
            self._engine,
            self._registry,
            self._checkpoints,
            self._agreements,
            self._quotas,
            self._tokenizer_files,
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

    def drain(self) -> None:
        self._registry.drain()

    async def stop(self) -> None:
        await self._background.close()
        await self._publisher.stop()
        await self._engine.close()
        await self._registry.close()
        if self._lock is not None:
            os.close(self._lock)

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
            **({} if found is None else _facts(found)),
        )
        if found is not None and found.reason:
            _log.warning("sequences do not share passes", model=model.name, reason=found.reason)

    def _start_run(self, run: RunRecord, engines_lost: int) -> None:
        self._recovery.start(run, engines_lost)

    def _engine_exited(self, status: int) -> None:
        _log.error("engine died", status=status)
        self._engine_lost("the engine died; it starts again, and the run comes back")

    def _engine_lost(self, message: str) -> None:
        self._registry.hold_all(errors.EngineUnavailable(message))
        if not self._restarting:
            self._restarting = True
            self._background.spawn(self._restart_engine())

    async def _watch_base(self) -> None:
        """Stop the engine when the sampler that lends its base weights ends; restart it on the next one's weights."""
        while True:
            await self._base.gone()
            if self._restarting:
                await asyncio.sleep(_RESTART_SECONDS)
                continue
            _log.error("the sampler that lends the base weights is gone; the engine waits for the next one")
            await self._engine.close()
            self._engine_lost("the sampler that lends the base weights is away; the run comes back when it does")

    async def _load_engine(self, load: Callable[[], Awaitable[ModelInfo]]) -> ModelInfo:
        """Start the engine process once base weights are available for it."""
        while True:
            await self._base.available()
            with suppress(errors.BaseUnavailable):
                return await load()

    async def _restart_engine(self) -> None:
        if self._readiness is None:
            return
        await self._readiness.set(False)
        model = await self._restarted()
        self._restarting = False
        self._log_ready(model)
        await self._readiness.set(True)
        await self._recovery.recover_all(self._registry)

    async def _restarted(self) -> ModelInfo:
        """Restart the engine, retrying without limit: the cause of a failure may be temporary."""
        for failures in itertools.count(1):
            try:
                return await self._load_engine(self._engine.restart)
            except Exception as error:
                seconds = backoff(failures, _RESTART_SECONDS, _MOST_RESTART_SECONDS)
                _log.warning("engine not started; trying again", error=repr(error), failures=failures, seconds=seconds)
            await asyncio.sleep(seconds)
        raise AssertionError("counting came to an end")


def _facts(certificate: ModelCertificate) -> dict[str, str | float]:
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


def _lock_volume(root: Path) -> int:
    """Lock the volume until the process ends: two trainers on one volume would overwrite each other's runs."""
    root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SystemExit(f"another trainer uses {root}; give this one its own checkpoint_dir") from None
    return descriptor
