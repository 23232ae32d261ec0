"""The sampler as `paceline.rpc.server.serve` runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version

import grpc
from prometheus_client import CollectorRegistry

from paceline.layout import Volume
from paceline.log import get_logger
from paceline.rpc.channel import open_channel
from paceline.rpc.interceptors import AroundInterceptor, CredentialInterceptor
from paceline.rpc.server import Readiness
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import add_SamplerServiceServicer_to_server
from paceline.shared_base import read_base
from sampler_service.engine.base import ModelEngine, SamplerEngine, WritableEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.sampling import Sampler
from sampler_service.servicer import SamplerServicer, ServerInfo
from sampler_service.settings import SamplerSettings
from sampler_service.validation import RequestLimits
from sampler_service.versions.base import Versions
from sampler_service.versions.bridges import Bridge, ManifestRules
from sampler_service.versions.collective import CollectiveBridge, GroupReceiver
from sampler_service.versions.in_place import InPlaceSlot
from sampler_service.versions.model_slot import ModelSlot
from sampler_service.versions.offers import Offers
from sampler_service.versions.push import PushReceiver
from sampler_service.versions.registry import RegistryLimits, VersionRegistry
from sampler_service.versions.resolver import VersionResolver
from sampler_service.versions.staging import StagingArea
from sampler_service.versions.stream import StreamBridge
from sampler_service.versions.trainer_link import TrainerLink
from sampler_service.versions.volume import VolumeBridge
from sampler_service.versions.watcher import VersionWatcher
from sampler_service.versions.writes import WriteListener

_HEALTH_SECONDS = 1.0
"""How often the engine is asked whether it lives."""

_log = get_logger(__name__)


class SamplerService:
    """Holds the engine, its versions, and the watch on the trainer."""

    name = "sampler"
    service_names: Sequence[str] = (pb.DESCRIPTOR.services_by_name["SamplerService"].full_name,)

    def __init__(self, settings: SamplerSettings, engine: SamplerEngine, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._engine = engine
        self._metrics = SamplerMetrics(registry)
        self._started = AsyncExitStack()
        self._servicer: SamplerServicer
        self._draining = False

    def interceptors(self) -> Sequence[AroundInterceptor]:
        return (CredentialInterceptor(self._settings.secret),)

    async def start(self, readiness: Readiness) -> None:
        """Load the base model, then follow the trainer.

        An engine that dies later ends the process, whose supervisor starts it anew.
        """
        settings, started = self._settings, self._started
        staging = StagingArea(settings.staging_dir)
        started.callback(staging.close)
        started.push_async_callback(self._engine.stop)
        await self._engine.start()
        channel = open_channel(settings.trainer, settings.upstream_tls)
        started.push_async_callback(channel.close)
        trainer = TrainerLink(channel, settings.secret, settings.fetch_timeout_seconds)
        whole_models = settings.whole_models or settings.in_place != "off"
        rules = ManifestRules(settings.served_name, settings.max_lora_rank, settings.max_version_bytes, whole_models)
        group, offers = self._group(staging, rules), Offers(settings.fetch_timeout_seconds)
        bridge = self._bridge(trainer, staging, rules, group, offers)
        resolver = VersionResolver(bridge)
        versions = self._versions(bridge, resolver, readiness)
        started.push_async_callback(versions.close)
        await self._listen_for_writes(versions)
        self._servicer = self._make_servicer(resolver, versions, PushReceiver(staging, rules, trainer))
        watcher = VersionWatcher(
            trainer,
            versions,
            resolver,
            settings.name_for_trainer,
            self._metrics,
            needs_volume=bridge.needs_volume,
            offers=None if bridge.needs_volume or group else offers,
            group=group,
        )
        self._keep_running("watcher", watcher.run(), readiness)
        self._keep_running("engine", self._watch_health(), readiness)

    def register(self, server: grpc.aio.Server) -> None:
        add_SamplerServiceServicer_to_server(self._servicer, server)

    def drain(self) -> None:
        """Leave the calls that wait: they end as those before them do."""
        self._draining = True

    async def stop(self) -> None:
        await self._started.aclose()

    def _group(self, staging: StagingArea, rules: ManifestRules) -> GroupReceiver | None:
        if self._settings.bridge != "collective":
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
        name = self._settings.bridge
        volume = VolumeBridge(Volume(self._settings.checkpoint_dir), trainer, rules, name)
        if name in {"volume", "restart"} or self._settings.in_place != "off":
            return volume
        stream = StreamBridge(trainer, staging, rules, volume, offers)
        return stream if group is None else CollectiveBridge(group, stream)

    def _versions(self, bridge: Bridge, resolver: VersionResolver, readiness: Readiness) -> Versions:
        versions = self._make_versions(bridge, resolver, readiness)
        self._metrics.versions_loaded.set_function(lambda: len(versions))
        self._metrics.completions_running.set_function(self._engine.num_running)
        return versions

    def _make_versions(self, bridge: Bridge, resolver: VersionResolver, readiness: Readiness) -> Versions:
        settings, engine = self._settings, self._engine
        name, seconds = settings.served_name, settings.fetch_timeout_seconds
        if isinstance(engine, ModelEngine):

            async def set_ready(ready: bool) -> None:
                await readiness.set(ready and not self._draining)

            return ModelSlot(engine, bridge, resolver, name, seconds, set_ready, self._metrics)
        if isinstance(engine, WritableEngine):
            return InPlaceSlot(engine, bridge, resolver, name, seconds, self._metrics)
        limits = RegistryLimits(settings.max_loaded_versions, settings.keep_versions, seconds)
        return VersionRegistry(engine, bridge, resolver, name, limits, self._metrics)

    async def _listen_for_writes(self, versions: Versions) -> None:
        if not isinstance(versions, InPlaceSlot):
            return
        directory = self._settings.base_dir
        listener = WriteListener(versions, directory, read_base(directory).generation)
        self._started.push_async_callback(listener.close)
        await listener.start()

    def _make_servicer(self, resolver: VersionResolver, versions: Versions, receiver: PushReceiver) -> SamplerServicer:
        settings, model = self._settings, self._engine.describe()
        info = ServerInfo(
            service_version=version("paceline"),
            model=model,
            engine=self._engine.name,
            engine_version=self._engine.version,
            bridge=settings.bridge,
            max_active_versions=settings.max_active_versions,
            max_num_samples=settings.max_num_samples,
            sampler_id=settings.name_for_trainer,
        )
        limits = RequestLimits(model, settings.max_num_samples, settings.max_topk_logprobs)
        sampler = Sampler(self._engine, versions, limits, settings.max_waiting, self._metrics)
        return SamplerServicer(info, sampler, versions, resolver, receiver)

    async def _watch_health(self) -> None:
        """Raise EngineUnavailable when the engine dies."""
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            await self._engine.check_health()

    def _keep_running(self, what: str, work: Coroutine[None, None, None], readiness: Readiness) -> None:
        """Run what must never end while the service does; if it does, the service fails."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                _log.error("ended by itself", part=what, exc_info=task.exception())
                readiness.fail(f"{what} ended by itself")

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._started.push_async_callback(_cancel, task)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
