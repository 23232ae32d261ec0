"""Which adapters the engine holds, who uses them, and when they go."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from paceline import errors
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from paceline.weights import served_model
from sampler_service.engine.base import Adapter, LoadTimes, SamplerEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.versions.bridges import Bridge, StagedAdapter, check_owner
from sampler_service.versions.flights import Flights, arriving_within
from sampler_service.versions.keys import VersionKey, absent
from sampler_service.versions.resolver import VersionResolver

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """How much is kept, and how long a request waits."""

    max_loaded: int
    """Versions in the engine."""
    keep_per_run: int
    """Newest versions of a run that stay although no request uses them."""
    fetch_timeout_seconds: float


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """An adapter that the engine holds."""

    served: ServedModel
    tenant: str
    adapter: Adapter
    staged: StagedAdapter
    times: LoadTimes
    requests_in_flight: int = 0
    retired: bool = False
    """Whether it goes when its last request ends."""

    @property
    def size_bytes(self) -> int:
        """Length of its safetensors file."""
        return self.staged.manifest.total_size


@dataclass(frozen=True, slots=True)
class Lease:
    """Weights that stay loaded while a request uses them."""

    served: ServedModel
    adapter: Adapter | None = None
    """None for the base model."""
    load_milliseconds: float = 0.0
    """What loading took; 0 when the weights were there."""
    is_current: Callable[[], bool] = lambda: True
    """Whether the engine still computes with them: other weights may be written in their place."""


class VersionRegistry:
    """Loads versions on demand, each once, and unloads those that nothing needs.

    What is loaded never changes: a key stands for one content. When the engine is full, the version that was used
    longest ago goes.
    """

    def __init__(
        self,
        engine: SamplerEngine,
        bridge: Bridge,
        resolver: VersionResolver,
        base_model: str,
        limits: RegistryLimits,
        metrics: SamplerMetrics,
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._resolver = resolver
        self._base = ServedModel(base_model)
        self._limits = limits
        self._metrics = metrics
        self._entries: OrderedDict[VersionKey, LoadedVersion] = OrderedDict()
        self._unverified: set[LoadedVersion] = set()
        """In the engine, and nobody's to ask for yet."""
        self._adapter_ids = count(1)
        self._changing = asyncio.Lock()
        self._flights: Flights[LoadedVersion] = Flights()
        self._unloading: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[ServedModel], None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LoadedVersion]:
        return iter(list(self._entries.values()))

    def find(self, key: VersionKey) -> LoadedVersion | None:
        """Return what is loaded under a key."""
        return self._entries.get(key)

    def on_unloaded(self, listener: Callable[[ServedModel], None]) -> None:
        """Call `listener` after each unloading."""
        self._listeners.append(listener)

    @asynccontextmanager
    async def lease(self, ref: ModelRef, tenant: str) -> AsyncIterator[Lease]:
        """Keep the weights that `ref` means loaded while the block runs, fetching them first if need be.

        Raises RunNotFound, VersionNotFound, CheckpointNotFound (also for another tenant's), TrainerUnavailable when
        they do not arrive in time, and what `install` raises.
        """
        if ref.is_base:
            yield Lease(self._base)
            return
        start = perf_counter()
        entry, was_loaded = await self._acquire(ref, tenant)
        try:
            yield Lease(entry.served, entry.adapter, 0.0 if was_loaded else 1e3 * (perf_counter() - start))
        finally:
            entry.requests_in_flight -= 1
            self._settle(entry)

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> LoadedVersion:
        """Bring a version and load it. Calls for the same one share the work, which goes on when a caller leaves."""
        return await self._flights.join(key, tenant, lambda: self._fetch(key.ref(), tenant))

    async def install(self, staged: StagedAdapter) -> LoadedVersion:
        """Load a staged adapter into the engine. Its files are the registry's from here on, also when this raises.

        Raises VersionExists when the key is taken by other content, Overloaded when every loaded version is in use, and
        what the engine raises.
        """
        try:
            return await self._install(staged)
        except BaseException:
            await staged.discard()
            raise

    def unload(self, ref: ModelRef, tenant: str) -> None:
        """Let a version go once its last request ends. Raises VersionNotFound, RunNotFound, CheckpointNotFound."""
        found = [entry for entry in self if VersionKey.of(entry.served).ref() == ref]
        if not found:
            raise absent(ref)
        for entry in found:
            check_owner(entry.tenant, ref, tenant)
        for entry in found:
            self._retire(entry)

    def forget_run(self, run_id: str) -> None:
        """Let everything of a deleted run go, as requests end."""
        for entry in self:
            if run_of(entry.served) == run_id:
                self._retire(entry)

    def retire_superseded(self, run_id: str) -> None:
        """Let all but the newest versions of a run go; one that is asked for later comes back."""
        versions = [entry for entry in self if entry.served.run_id == run_id and entry.served.version]
        versions.sort(key=lambda entry: entry.served.version, reverse=True)
        for entry in versions[self._limits.keep_per_run :]:
            self._retire(entry)

    async def close(self) -> None:
        """End what is under way."""
        await self._flights.close()
        await asyncio.gather(*self._unloading, return_exceptions=True)

    async def _acquire(self, ref: ModelRef, tenant: str) -> tuple[LoadedVersion, bool]:
        was_loaded = True
        async with arriving_within(self._limits.fetch_timeout_seconds):
            while True:
                key = await self._resolve(ref, tenant)
                entry = self._entries.get(key)
                if entry is not None:
                    break
                was_loaded = False
                await self.fetch(key, tenant)
        # Nothing is awaited between finding the entry and counting the request, so it cannot be unloaded in between.
        check_owner(entry.tenant, ref, tenant)
        entry.requests_in_flight += 1
        self._entries.move_to_end(key)
        return entry, was_loaded

    async def _resolve(self, ref: ModelRef, tenant: str) -> VersionKey:
        try:
            return await self._resolver.resolve(ref, tenant)
        except errors.TrainerUnavailable:
            # A checkpoint that is loaded outlives the trainer; its answers name the content by its SHA-256.
            loaded = [key for key in self._entries if ref.checkpoint and key.checkpoint == ref.checkpoint]
            if not loaded:
                raise
            return loaded[-1]

    async def _fetch(self, ref: ModelRef, tenant: str) -> LoadedVersion:
        with self._metrics.fetch_seconds.time():
            staged = await self._bridge.fetch(ref, tenant)
        return await self.install(staged)

    async def _install(self, staged: StagedAdapter) -> LoadedVersion:
        key = VersionKey.of(served_model(staged.manifest))
        existing = self._entries.get(key)
        if existing is None:
            async with self._loading(staged) as entry:
                await staged.verified()
                entry.served = served_model(staged.manifest)
                existing = self._entries.setdefault(key, entry)
            if existing is entry:
                _log.info("version loaded", run=key.run_id, version=key.version, checkpoint=key.checkpoint)
                return entry
        await staged.verified()
        if existing.served.sha256 != staged.sha256:
            raise errors.VersionExists("the version exists with other content; publish a new one", field="model")
        await staged.discard()
        return existing

    @asynccontextmanager
    async def _loading(self, staged: StagedAdapter) -> AsyncIterator[LoadedVersion]:
        """Load an adapter, of which the last bytes may still be verified.

        Nobody can ask for it before it is among the entries; unless it is when the block ends, the engine drops it.
        """
        async with self._changing:
            await self._make_room()
            entry = await self._load(staged)
            self._unverified.add(entry)
        try:
            yield entry
        finally:
            self._unverified.discard(entry)
            if self._entries.get(VersionKey.of(entry.served)) is not entry:
                await self._engine.remove_adapter(entry.adapter)

    async def _load(self, staged: StagedAdapter) -> LoadedVersion:
        served, tenant, adapter_id = served_model(staged.manifest), staged.manifest.tenant, next(self._adapter_ids)
        name = "/".join((tenant, served.run_id, served.checkpoint or str(served.version), str(adapter_id)))
        adapter = Adapter(adapter_id, name, staged.directory, in_memory=staged.temporary)
        with self._metrics.load_seconds.time():
            times = await self._engine.add_adapter(adapter)
        self._metrics.observe_load(times)
        return LoadedVersion(served, tenant, adapter, staged, times)

    async def _make_room(self) -> None:
        while len(self._entries) + len(self._unverified) >= self._limits.max_loaded:
            idle = next((entry for entry in self if not entry.requests_in_flight), None)
            if idle is None:
                raise errors.Overloaded(f"all {len(self._entries)} versions that fit are in use; try again")
            await self._unload(idle)

    def _retire(self, entry: LoadedVersion) -> None:
        entry.retired = True
        self._settle(entry)

    def _settle(self, entry: LoadedVersion) -> None:
        if entry.retired and not entry.requests_in_flight:
            self._spawn(self._unload_idle(entry))

    async def _unload_idle(self, entry: LoadedVersion) -> None:
        async with self._changing:
            if self._entries.get(VersionKey.of(entry.served)) is entry and not entry.requests_in_flight:
                await self._unload(entry)

    async def _unload(self, entry: LoadedVersion) -> None:
        """Unload an entry that no request uses; it cannot be found from the first moment on."""
        served = entry.served
        del self._entries[VersionKey.of(served)]
        try:
            await self._engine.remove_adapter(entry.adapter)
        finally:
            await entry.staged.discard()
        for listener in self._listeners:
            listener(served)
        _log.info("version unloaded", run=served.run_id, version=served.version, checkpoint=served.checkpoint)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._unloading.add(task)
        task.add_done_callback(self._unloaded)

    def _unloaded(self, task: asyncio.Task[None]) -> None:
        self._unloading.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("version not unloaded", error=repr(error))


def run_of(served: ServedModel) -> str:
    """Return the run that weights come from."""
    return CheckpointPath.parse(served.checkpoint).run_id if served.checkpoint else served.run_id
