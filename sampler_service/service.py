"""The sampler service, as run by `paceline.rpc.server.serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import cast

import grpc
from prometheus_client import CollectorRegistry

from paceline.base_model.weight_sharing import read_base
from paceline.layout import Volume
from paceline.log import get_logger
from paceline.requests.tenant_limits import HeardLimits
from paceline.rpc.channel import open_channel
from paceline.rpc.interceptors import AroundInterceptor, CredentialInterceptor
from paceline.rpc.process_metrics import add_free_bytes
from paceline.rpc.quota_metrics import add_quota_metrics
from paceline.rpc.server import Readiness
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import add_SamplerServiceServicer_to_server
from paceline.types import ModelInfo
from sampler_service.agreement import AgreementStatus
from sampler_service.engine.options import Weights
from sampler_service.engine.protocol import WritableEngine
from sampler_service.engine.restartable import RestartableEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.recovery import EngineKeeper
from sampler_service.rpc.servicer import SamplerServicer
from sampler_service.sampling import Sampler
from sampler_service.scheduling.admission import Admission, ResourceLimits
from sampler_service.scheduling.tenant_metrics import add_tenant_metrics
from sampler_service.scheduling.tenant_queue import TenantQueue
from sampler_service.settings import SamplerSettings
from sampler_service.stores.adapters import VersionRegistry
from sampler_service.stores.base import VersionResolver, Versions
from sampler_service.stores.disk import DiskTier
from sampler_service.stores.full_model import ModelSlot
from sampler_service.stores.in_place import InPlaceSlot, UpdateServer
from sampler_service.stores.places import RegistryLimits
from sampler_service.stores.version import VersionTable
from sampler_service.transports.base import Bridge, ManifestRules
from sampler_service.transports.collective import GroupReceiver
from sampler_service.transports.push import PushReceiver
from sampler_service.transports.staging import StagingArea
from sampler_service.transports.stream import Offers, StreamBridge
from sampler_service.transports.trainer_link import TrainerLink
from sampler_service.transports.volume import VolumeBridge
from sampler_service.validation import RequestLimits
from sampler_service.watcher import VersionWatcher

_log = get_logger(__name__)

_AHEAD = 2
"""Completions handed to the engine per place in its batch, so that it never runs out of work."""


class SamplerService:
    """Owns the engine, its versions, and the watch on the trainer."""

    name = "sampler"
    service_names: Sequence[str] = (pb.DESCRIPTOR.services_by_name["SamplerService"].full_name,)

    def __init__(self, settings: SamplerSettings, engine: RestartableEngine, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._mode = settings.mode
        self._engine = engine
        self._registry = registry
        self._metrics = SamplerMetrics(registry)
        self._tenants = HeardLimits()
        self._started = AsyncExitStack()
        self._servicer: SamplerServicer
        self._draining = False

    def interceptors(self) -> Sequence[AroundInterceptor]:
        return (CredentialInterceptor(self._settings.secret, self._tenants),)

    async def start(self, readiness: Readiness) -> None:
        """Load the base model, then follow the trainer.

        If the engine dies later it is restarted; if that does not succeed, the service fails.
        """
        settings, started = self._settings, self._started
        staging = StagingArea(settings.staging_dir)
        started.callback(staging.close)
        started.push_async_callback(self._engine.stop)
        await self._engine.start()
        model = replace(self._engine.describe(), weights_sha256=self._engine.base_sha256)
        channel = open_channel(settings.trainer, settings.upstream_tls, bulk=True)
        started.push_async_callback(channel.close)
        trainer = TrainerLink(channel, settings.secret, settings.fetch_timeout_seconds)
        rules = ManifestRules(
            settings.served_name,
            settings.max_lora_rank,
            settings.max_version_bytes,
            self._mode.serves == "models",
            model.weights_sha256,
        )
        group, offers = self._group(staging, rules), Offers(settings.fetch_timeout_seconds)
        bridge = self._bridge(trainer, staging, rules, group, offers)
        resolver = VersionResolver(bridge)
        disk = self._disk()
        versions = self._make_versions(bridge, resolver, disk, readiness)
        self._show_memory(versions, disk)
        started.push_async_callback(versions.close)
        await self._listen_for_writes(versions)
        agreement = AgreementStatus(self._engine, versions, model, readiness.obstruct, self._metrics)
        receiver = PushReceiver(staging, rules, trainer)
        self._servicer = self._make_servicer(model, versions, receiver, agreement)
        watcher = VersionWatcher(
            trainer,
            versions,
            resolver,
            settings.name_for_trainer,
            model,
            agreement,
            self._metrics,
            serves=self._mode.serves,
            needs_volume=bridge.needs_volume,
            offers=None if bridge.needs_volume or group else offers,
            group=group,
        )
        self._keep_running("watcher", watcher.run(), readiness)
        # Weights lent for writing are lost with the engine, so it is not restarted: the trainer needs new ones.
        attempts = 0 if self._mode.weights is Weights.WRITE else settings.engine_restarts
        keeper = EngineKeeper(self._engine, versions, self._ready_setter(readiness), attempts, self._metrics)
        self._keep_running("engine", keeper.run(), readiness)

    def register(self, server: grpc.aio.Server) -> None:
        add_SamplerServiceServicer_to_server(self._servicer, server)

    def drain(self) -> None:
        """Keep readiness off from now on. Waiting calls are left to finish as those before them end."""
        self._draining = True

    async def stop(self) -> None:
        await self._started.aclose()

    def _group(self, staging: StagingArea, rules: ManifestRules) -> GroupReceiver | None:
        if self._mode.bridge != "collective":
            return None
        group = GroupReceiver(staging, rules, self._metrics)
        self._started.push_async_callback(group.close)
        return group

    def _bridge(
        self,
        trainer: TrainerLink,
        staging: StagingArea,
        rules: ManifestRules,
        group: GroupReceiver | None,
        offers: Offers,
    ) -> Bridge:
        volume = VolumeBridge(Volume(self._settings.checkpoint_dir), trainer, rules)
        if self._mode.reads_volume:
            return volume
        return StreamBridge(trainer, staging, rules, volume, offers, group)

    def _disk(self) -> DiskTier:
        """Return the disk tier for evicted versions. It is off for whole models, which are fetched again anyway."""
        directory, most = self._settings.scratch_dir, self._settings.max_disk_versions
        scratch = StagingArea(directory) if directory else None
        if scratch is not None:
            self._started.callback(scratch.close)
        return DiskTier(VersionTable(), scratch, most if self._mode.weights is Weights.ADAPTERS else 0)

    def _show_memory(self, versions: Versions, disk: DiskTier) -> None:
        """Log the limits on slots, host memory and disk that the settings imply, and export their usage as metrics."""
        metrics, slots = self._metrics, self._engine.slots()
        _log.info(
            "memory for versions",
            slots=slots.count,
            slots_mib=round(slots.size_bytes / (1 << 20)),
            loaded_at_most=self._settings.max_loaded_versions,
            on_disk_at_most=disk.most,
        )
        metrics.slots.set(slots.count)
        metrics.slot_bytes.set(slots.size_bytes)
        metrics.versions_in_use.set_function(lambda: sum(entry.requests_in_flight > 0 for entry in versions))
        metrics.versions_loaded.set_function(lambda: len(versions))
        metrics.version_bytes.set_function(lambda: sum(entry.staged.manifest.total_size for entry in versions))
        metrics.versions_on_disk.set_function(lambda: len(disk))
        metrics.disk_bytes.set_function(lambda: sum(version.staged.manifest.total_size for version in disk))
        metrics.completions_running.set_function(self._engine.num_running)
        name, staging = "paceline_sampler_{}_free_bytes", self._settings.staging_dir
        add_free_bytes(name.format("staging"), "Free bytes of staging_dir's disk or memory", staging, self._registry)
        if (scratch := self._settings.scratch_dir) is not None:
            add_free_bytes(name.format("scratch"), "Free bytes of scratch_dir's disk", scratch, self._registry)

    def _make_versions(
        self, bridge: Bridge, resolver: VersionResolver, disk: DiskTier, readiness: Readiness
    ) -> Versions:
        settings, engine = self._settings, self._engine
        name, seconds = settings.served_name, settings.fetch_timeout_seconds
        if self._mode.weights is Weights.WRITE:
            return InPlaceSlot(cast("WritableEngine", engine.current), bridge, resolver, name, seconds, self._metrics)
        if self._mode.serves == "models":
            return ModelSlot(engine, bridge, resolver, name, seconds, self._ready_setter(readiness), self._metrics)
        limits = RegistryLimits(
            settings.max_loaded_versions,
            settings.keep_versions,
            seconds,
            settings.max_versions_per_tenant,
            self._tenants,
        )
        return VersionRegistry(engine, bridge, resolver, name, limits, self._metrics, disk)

    async def _listen_for_writes(self, versions: Versions) -> None:
        if not isinstance(versions, InPlaceSlot):
            return
        directory = self._settings.base_dir
        listener = UpdateServer(versions, directory, read_base(directory).generation)
        self._started.push_async_callback(listener.close)
        await listener.start()

    def _make_servicer(
        self, model: ModelInfo, versions: Versions, receiver: PushReceiver, agreement: AgreementStatus
    ) -> SamplerServicer:
        settings = self._settings
        limits = RequestLimits(model, settings.max_num_samples, settings.max_topk_logprobs, settings.max_unread_tokens)
        admission = Admission(
            ResourceLimits(settings.max_waiting, settings.max_completions_per_tenant),
            ResourceLimits(settings.max_waiting_tokens, settings.max_tokens_per_tenant),
            tenants=self._tenants,
        )
        queue = TenantQueue(_AHEAD * settings.max_num_seqs, first_at_once=True)
        self._metrics.completions_waiting.set_function(lambda: queue.waiting)
        add_tenant_metrics(queue, self._registry)
        most = settings.max_loaded_versions
        sampler = Sampler(
            self._engine,
            versions,
            limits,
            admission,
            queue,
            self._metrics,
            agreement.check,
            lambda tenant: min(most, self._tenants.of(tenant, "versions", settings.max_versions_per_tenant) or most),
        )
        add_quota_metrics(self.name, sampler.tenants, sampler.quotas, self._registry)
        return SamplerServicer(settings, self._engine, model, sampler, versions, receiver, agreement)

    def _ready_setter(self, readiness: Readiness) -> Callable[[bool], Awaitable[None]]:
        async def set_ready(ready: bool) -> None:
            await readiness.set(ready and not self._draining)

        return set_ready

    def _keep_running(self, what: str, work: Coroutine[None, None, None], readiness: Readiness) -> None:
        """Run a task that must not end before the service; if it does, the service fails."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                _log.error("stopped unexpectedly", part=what, exc_info=task.exception())
                readiness.fail(f"{what} stopped unexpectedly: {task.exception()}")

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._started.push_async_callback(_cancel, task)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
