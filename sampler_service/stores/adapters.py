"""The adapters that the engine holds: loading, also after a restart, leases, and eviction."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, count
from time import perf_counter

from paceline import errors
from paceline.background import Background
from paceline.layout import WEIGHTS_FILE
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from paceline.weights import absent, check_finite
from sampler_service.engine.protocol import Adapter, SamplerEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import (
    Arrival,
    Arrivals,
    Lease,
    Listeners,
    LoadedVersion,
    SharedFetches,
    VersionResolver,
    run_of,
)
from sampler_service.stores.disk import DiskTier
from sampler_service.transports.base import (
    Bridge,
    ReplacedError,
    StagedAdapter,
    VersionKey,
    abandon,
    arriving_within,
    check_owner,
    is_for,
)

_log = get_logger(__name__)

_ROOM_SECONDS = 1.0
"""Retry delay for a caller that found all versions in use."""


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Limits on loaded versions, and the timeout of fetches."""

    max_loaded: int
    """Most versions in the engine."""
    keep_per_run: int
    """Newest versions of each run that stay loaded even if no request uses them."""
    fetch_timeout_seconds: float
    max_per_tenant: int = 0
    """Most versions of one tenant in the engine, even if it is the only tenant; 0 means `max_loaded`."""


class VersionRegistry:
    """Loads versions on demand, each only once, and unloads versions that are no longer needed.

    A loaded version never changes: a key identifies one content. If the trainer has other content under a number, for
    example after its volume was restored, that content replaces the one held here; requests in progress end on the
    content that they started with. If the engine is full, the least recently used idle version is evicted to disk: one
    of the tenant that needs room, or, if that tenant is below its share, one of a tenant above its share.
    """

    def __init__(
        self,
        engine: SamplerEngine,
        bridge: Bridge,
        resolver: VersionResolver,
        base_model: str,
        limits: RegistryLimits,
        metrics: SamplerMetrics,
        disk: DiskTier,
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._resolver = resolver
        self._base = ServedModel(base_model)
        self._limits = limits
        self._metrics = metrics
        self._disk = disk
        self._entries: OrderedDict[VersionKey, LoadedVersion] = OrderedDict()
        self._unverified: set[LoadedVersion] = set()
        """Loaded into the engine but not verified, so no request can find them yet."""
        self._displaced: set[LoadedVersion] = set()
        """Loaded until their last request ends, but no new request can find them."""
        self._evicted: set[LoadedVersion] = set()
        """Being unloaded, to wait on disk."""
        self._returning: dict[VersionKey, StagedAdapter] = {}
        """Being loaded from disk."""
        self._unloads = 0
        """Versions being unloaded, which takes a step of the engine; each occupies its place until then."""
        self._unloaded = asyncio.Event()
        """Set when one of them has been unloaded."""
        self._adapter_ids = count(1)
        self._changing = asyncio.Lock()
        self._fetches: SharedFetches[LoadedVersion] = SharedFetches()
        self._installing = Background("version not installed")
        self._unloading = Background("version not unloaded")
        self.listeners = Listeners()
        self.listeners.released.append(lambda served: resolver.dropped(served.run_id, served.version))
        self.arrivals = Arrivals()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LoadedVersion]:
        return iter(list(self._entries.values()))

    def serves(self, ref: ModelRef) -> bool:
        return True

    def find(self, key: VersionKey) -> LoadedVersion | None:
        """Return the loaded version with this key, if any."""
        return self._entries.get(key)

    def held(self) -> Iterator[ServedModel]:
        return (staged.served for staged in chain(self._all_staged(), self._returning.values()))

    @asynccontextmanager
    async def lease(self, ref: ModelRef, tenant: str) -> AsyncIterator[Lease]:
        """Keep the weights that `ref` names loaded while the block runs, fetching them first if necessary.

        Raises RunNotFound, VersionNotFound, CheckpointNotFound (also for another tenant's), TrainerUnavailable if they
        do not arrive in time, EngineUnavailable, and what `install` raises.
        """
        await self._engine.check_health()
        if ref.is_base:
            yield Lease(self._base)
            return
        start = perf_counter()
        entry, was_loaded = await self._acquire(ref, tenant)
        milliseconds = 0.0 if was_loaded else 1e3 * (perf_counter() - start)
        with ExitStack() as held:
            held.callback(self._leave, entry)
            yield Lease(entry.served, entry.adapter, milliseconds, held.close)

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> LoadedVersion:
        """Fetch and load a version. Concurrent calls share one fetch, which continues if a caller is cancelled."""
        return await self._fetches.join(key, tenant, lambda: self._fetch(key, tenant))

    async def install(self, staged: StagedAdapter, arrival: Arrival) -> LoadedVersion:
        """Load a pushed adapter and unload those of its run that it supersedes. Raises as `_install`."""
        try:
            entry = await self._install(staged, arrival)
        except ReplacedError as error:
            raise errors.EngineUnavailable(
                "the pushed files were removed while they were loaded; push again"
            ) from error
        self._resolver.pushed(entry.served.run_id, entry.served.version)
        self.retire_superseded(entry.served.run_id)
        return entry

    def unload(self, ref: ModelRef, tenant: str) -> None:
        """Unload a version once its last request ends. Raises VersionNotFound or CheckpointNotFound."""

        def is_meant(staged: StagedAdapter) -> bool:
            return staged.key.ref() == ref and is_for(staged.manifest.tenant, tenant)

        if not any(map(is_meant, self._all_staged())):
            raise absent(ref)
        self._resolver.dropped(ref.run_id, ref.version or 0)
        self._retire_all(is_meant)

    def displace(self, key: VersionKey, blake3: str) -> None:
        """Displace other content under the same number: no new request uses it, and it is unloaded when idle."""
        entry = self._entries.get(key)
        if entry is not None and entry.served.blake3 != blake3:
            _log.warning("version displaced", weights=str(key.ref()), had=entry.served.blake3, announced=blake3)
            del self._entries[key]
            self._displaced.add(entry)
            self._retire(entry)
        self._drop_evicted(lambda staged: staged.key == key and staged.served.blake3 != blake3)

    def forget_run(self, run_id: str) -> None:
        """Unload everything of a deleted run as its requests end, and refuse what is about to arrive."""
        self.arrivals.forget_run(run_id)
        self._retire_all(lambda staged: run_of(staged.key) == run_id)

    def retire_superseded(self, run_id: str) -> None:
        """Unload all but the newest versions of a run; one that is requested later is fetched again.

        Numbers above the newest come from before the trainer's volume was restored, or were pushed earlier: they are
        unloaded first.
        """
        newest = self._resolver.newest(run_id)
        held = {served.version for served in self.held() if served.run_id == run_id}
        versions = sorted(held, key=lambda version: (version <= newest, version), reverse=True)
        superseded = set(versions[self._limits.keep_per_run :]) - {0}
        self._retire_all(lambda staged: staged.key.run_id == run_id and staged.key.version in superseded)

    def revived(self, lost: Sequence[Adapter]) -> None:
        """Fetch again the versions that the restarted engine could not load from their files."""
        for entry in self:
            if entry.adapter in lost:
                del self._entries[entry.key]
                self._unloading.spawn(self._fetch_again(entry))
        for entry in self._unverified:
            entry.retired = entry.retired or entry.adapter in lost

    async def close(self) -> None:
        """Cancel everything in progress and finish pending writes to disk."""
        await self._fetches.close()
        await self._installing.close()
        await self._unloading.close()
        await self._disk.close()

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
        # No await between finding the entry and counting the request, so it cannot be unloaded in between.
        check_owner(entry.tenant, ref, tenant)
        entry.requests_in_flight += 1
        self._entries.move_to_end(key)
        return entry, was_loaded

    async def _resolve(self, ref: ModelRef, tenant: str) -> VersionKey:
        try:
            return await self._resolver.resolve(ref, tenant)
        except errors.TrainerUnavailable:
            # A loaded checkpoint is served without the trainer; responses name its content by BLAKE3.
            loaded = [key for key in self._entries if ref.checkpoint and key.checkpoint == ref.checkpoint]
            if not loaded:
                raise
            return loaded[-1]

    async def _fetch(self, key: VersionKey, tenant: str) -> LoadedVersion:
        arrival = self.arrivals.expect(run_of(key))
        if (waiting := self._disk.take(key, tenant)) is not None:
            self._returning[key] = waiting
            try:
                return await self._install(waiting, arrival, waited=True)
            except BaseException as error:
                if self._disk.find(key) is None and key not in self._entries:
                    self.listeners.notify_released(waiting.served)
                if not isinstance(error, errors.ChecksumMismatch):
                    raise
                _log.warning("version damaged on disk; it is fetched again", weights=str(key.ref()))
            finally:
                self._returning.pop(key, None)
        self._check_room(tenant)
        while True:
            with self._metrics.fetch_seconds.time():
                staged = await self._bridge.fetch(key.ref(), tenant)
            try:
                return await self._install(staged, arrival)
            except ReplacedError:
                _log.info("weights overwritten while they were loaded; they are fetched again", weights=str(key.ref()))

    def _all_staged(self) -> Iterator[StagedAdapter]:
        return chain((entry.staged for entry in chain(self, self._evicted)), self._disk)

    async def _install(self, staged: StagedAdapter, arrival: Arrival, *, waited: bool = False) -> LoadedVersion:
        """Load a staged adapter into the engine. The registry owns its files from now on, even if this raises.

        One that `waited` on disk waits on if there is no room for it: it may be nowhere else.
        Loading continues if the caller is cancelled, so that the engine never holds an adapter that is not registered.
        Raises VersionExists if the key is taken by other content, Overloaded if every loaded version is in use,
        NonFinite for weights that are not finite, RunNotFound if the run is deleted meanwhile, and what the engine
        raises.
        """
        return await self._installing.run(self._install_or_discard(staged, arrival, waited=waited))

    async def _install_or_discard(self, staged: StagedAdapter, arrival: Arrival, *, waited: bool) -> LoadedVersion:
        try:
            entry = self._entries.get(staged.key) or await self._load(staged, arrival)
            if entry.staged is not staged:
                await staged.verified()
                entry.staged.check_same(staged)
                await staged.discard()
            return entry
        except BaseException as error:
            if waited and isinstance(error, errors.Exhausted) and not arrival.is_deleted:
                await self._disk.put_back(staged, self._release)
                raise
            await staged.discard()
            if isinstance(error, FileNotFoundError):
                raise ReplacedError(
                    "the files were removed while they were loaded; ask again", field="model"
                ) from error
            raise

    async def _load(self, staged: StagedAdapter, arrival: Arrival) -> LoadedVersion:
        """Load and verify an adapter; return its entry, or the entry of the same version that was loaded meanwhile."""
        numbers = asyncio.create_task(asyncio.to_thread(check_finite, staged.directory / WEIGHTS_FILE))
        try:
            async with self._loading(staged) as entry:
                await staged.verified()
                await numbers
                entry.served = staged.served
                await self._disk.replace(staged)
                if entry.retired:
                    raise errors.EngineUnavailable("the engine died and lost the version")
                arrival.check()
                existing = self._entries.setdefault(entry.key, entry)
        finally:
            abandon(numbers)  # if loading failed, the files are about to be removed
        if existing is entry:
            self.listeners.notify_loaded(entry)
        return existing

    @asynccontextmanager
    async def _loading(self, staged: StagedAdapter) -> AsyncIterator[LoadedVersion]:
        """Load an adapter whose bytes may still be being verified.

        No request can find it until it is in `_entries`. If it is not there when the block ends, it is unloaded.
        """
        served, tenant = staged.served, staged.manifest.tenant
        async with self._changing:
            await self._make_room(tenant)
            number = next(self._adapter_ids)
            name = f"{tenant}/{served.run_id}/{served.checkpoint or served.version}/{number}"
            adapter = Adapter(number, name, staged.directory, in_memory=staged.in_memory, contents=staged)
            with self._metrics.load_seconds.time():
                times = await self._engine.add_adapter(adapter)
            self._metrics.observe_load(times)
            entry = LoadedVersion(staged, adapter, times)
            self._unverified.add(entry)
        try:
            yield entry
        finally:
            self._unverified.discard(entry)
            if self._entries.get(entry.key) is not entry:
                await self._engine.remove_adapter(adapter)

    async def _make_room(self, tenant: str) -> None:
        """Evict idle versions until a version of this tenant fits. Raises QuotaExceeded, Overloaded."""
        while (is_full := self._taken() >= self._limits.max_loaded) or self._has_its_own(tenant):
            # A version that is being unloaded counts until the engine has dropped it; wait rather than evict another.
            if is_full and self._unloads:
                self._unloaded.clear()
                await self._unloaded.wait()
                continue
            idle = self._find_idle(tenant)
            if idle is None:
                raise self._no_room(tenant)
            await self._unload(idle, may_wait=not idle.retired)

    def _has_its_own(self, tenant: str) -> bool:
        """Return whether a tenant has reached its own limit, which applies even if it is the only tenant."""
        return bool(self._limits.max_per_tenant) and self._loaded_of()[tenant] >= self._limits.max_per_tenant

    def _loaded_of(self) -> Counter[str]:
        return Counter(entry.tenant for entry in chain(self._entries.values(), self._unverified))

    def _taken(self) -> int:
        """Return the number of occupied places in the engine."""
        return len(self._entries) + len(self._displaced) + len(self._unverified) + self._unloads

    def _find_idle(self, tenant: str) -> LoadedVersion | None:
        """Return the version to evict for one of this tenant. Tenants within their share lose none to other tenants."""
        if (nobodys := next((entry for entry in self._displaced if not entry.requests_in_flight), None)) is not None:
            return nobodys
        loaded = self._loaded_of()
        share = self._share(loaded, tenant)
        idle = [entry for entry in self if not entry.requests_in_flight]
        mine = next((entry for entry in idle if entry.tenant == tenant), None)
        if loaded[tenant] >= share or self._has_its_own(tenant):
            return mine
        return next((entry for entry in idle if loaded[entry.tenant] > share), mine)

    def _share(self, loaded: Counter[str], tenant: str) -> int:
        """Return the number of versions that a tenant may have, whatever other tenants hold."""
        return max(1, self._limits.max_loaded // len({*loaded, tenant}))

    def _check_room(self, tenant: str) -> None:
        """Refuse a version that could not be loaded, before it is fetched. Raises QuotaExceeded, Overloaded."""
        if self._taken() < self._limits.max_loaded or self._unloads:
            return
        if tenant == PEER_TENANT:  # the owner is known only from the manifest, once it is fetched
            is_hopeless = all(entry.requests_in_flight for entry in chain(self._displaced, self))
        else:
            is_hopeless = self._find_idle(tenant) is None
        if is_hopeless:
            raise self._no_room(tenant)

    def _no_room(self, tenant: str) -> errors.Exhausted:
        loaded = self._loaded_of()
        used, share = loaded[tenant], self._share(loaded, tenant)
        if self._has_its_own(tenant):
            return errors.QuotaExceeded(
                f"all {used} versions that this tenant may have loaded are in use: wait for their requests to end, or "
                f"have the operator raise max_versions_per_tenant",
                metadata={"quota": "versions", "used": str(used), "limit": str(self._limits.max_per_tenant)},
                retry_after=_ROOM_SECONDS,
            )
        message = f"all {self._limits.max_loaded} versions that fit are in use; try again"
        if share <= used < self._limits.max_loaded:
            message = f"all {used} versions of this tenant are in use, and {share} are its share; try again"
        return errors.Overloaded(message, retry_after=_ROOM_SECONDS)

    def _retire_all(self, is_meant: Callable[[StagedAdapter], bool]) -> None:
        for entry in self:
            if is_meant(entry.staged):
                self._retire(entry)
        self._drop_evicted(is_meant)

    def _drop_evicted(self, is_meant: Callable[[StagedAdapter], bool]) -> None:
        """Drop versions that wait on disk, or are about to."""
        for entry in self._evicted:
            entry.retired |= is_meant(entry.staged)
        for staged in self._disk.remove(is_meant):
            self._unloading.spawn(self._release(staged))

    def _retire(self, entry: LoadedVersion) -> None:
        entry.retired = True
        self._settle(entry)

    def _leave(self, entry: LoadedVersion) -> None:
        entry.requests_in_flight -= 1
        self._settle(entry)

    def _settle(self, entry: LoadedVersion) -> None:
        if entry.retired and not entry.requests_in_flight:
            self._unloading.spawn(self._unload_idle(entry))

    async def _unload_idle(self, entry: LoadedVersion) -> None:
        is_loaded = entry in self._displaced or self._entries.get(entry.key) is entry
        if is_loaded and not entry.requests_in_flight:
            await self._unload(entry)

    async def _unload(self, entry: LoadedVersion, *, may_wait: bool = False) -> None:
        """Unload an idle entry; from the start of the call no request can find it.

        With `may_wait` its files are kept on disk until it is requested again.
        """
        if entry in self._displaced:
            self._displaced.remove(entry)
        else:
            del self._entries[entry.key]
        waits = False
        self._unloads += 1
        if may_wait:
            self._evicted.add(entry)
        try:
            await self._engine.remove_adapter(entry.adapter)
            waits = may_wait and not entry.retired
        finally:
            self._evicted.discard(entry)
            self._unloads -= 1
            self._unloaded.set()
            await (self._disk.put(entry.staged, self._release) if waits else self._release(entry.staged))

    async def _release(self, staged: StagedAdapter) -> None:
        try:
            await staged.discard()
        finally:
            # Otherwise other content under this key is held.
            if staged.key not in self._entries and self._disk.find(staged.key) is None:
                self.listeners.notify_released(staged.served)

    async def _fetch_again(self, entry: LoadedVersion) -> None:
        """Fetch a lost version again; only if that fails, report to the trainer that it is no longer held."""
        await entry.staged.discard()
        try:
            if not entry.retired:
                await self.fetch(entry.key)
                return
        except errors.PacelineError as error:
            _log.warning("version lost with the engine", name=entry.adapter.name, reason=error.reason)
        self.listeners.notify_released(entry.served)
