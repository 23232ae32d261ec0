"""The adapters that the engine holds: loading, also after a restart, leases, and eviction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import count
from time import perf_counter

from paceline import errors, tracing
from paceline.background import Background
from paceline.layout import WEIGHTS_FILE
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from paceline.weights import absent, check_finite
from sampler_service.engine.liveness import until_alive
from sampler_service.engine.protocol import Adapter, SamplerEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import Arrival, Arrivals, Lease, Listeners, SharedFetches, VersionResolver, run_of
from sampler_service.stores.disk import DiskTier
from sampler_service.stores.places import Places, RegistryLimits
from sampler_service.stores.version import HELD, LEFT_WHEN_IDLE, Version, VersionState
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


class VersionRegistry:
    """Loads versions on demand, each only once, and unloads versions that are no longer needed.

    A loaded version never changes: a key identifies one content. If the trainer has other content under a number, for
    example after its volume was restored, that content replaces the one that is here; requests in progress end on the
    content that they started with. If the engine is full, an idle version is evicted to disk, chosen by `Places`.
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
        self._table = disk.table
        self._places = Places(self._table, limits)
        self._adapter_ids = count(1)
        self._loading = asyncio.Lock()
        self._fetches: SharedFetches[Version] = SharedFetches()
        self._installing = Background("version not installed")
        self._unloading = Background("version not unloaded")
        self.listeners = Listeners()
        self.listeners.released.append(lambda served: resolver.dropped(served.run_id, served.version))
        self.arrivals = Arrivals()

    def __len__(self) -> int:
        return self._table.num_findable()

    def __iter__(self) -> Iterator[Version]:
        return iter(self._table.findable())

    def serves(self, ref: ModelRef) -> bool:
        return True

    def find(self, key: VersionKey) -> Version | None:
        """Return the loaded version with this key, if any."""
        return self._table.find(key)

    def held(self) -> Iterator[ServedModel]:
        return (version.served for version in self._table.held())

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
        version, was_loaded = await self._acquire(ref, tenant)
        milliseconds = 0.0 if was_loaded else 1e3 * (perf_counter() - start)
        with ExitStack() as resources:
            resources.callback(self._end_use, version)
            yield Lease(version.served, version.adapter, milliseconds, resources.close)

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> Version:
        """Fetch and load a version. Concurrent calls share one fetch, which continues if a caller is cancelled."""
        return await self._fetches.join(key, tenant, lambda: self._fetch(key, tenant))

    async def install(self, staged: StagedAdapter, arrival: Arrival) -> Version:
        """Load a pushed adapter and unload those of its run that it supersedes. Raises as `_install`."""
        try:
            version = await self._install(self._table.add(staged), arrival)
        except ReplacedError as error:
            raise errors.EngineUnavailable(
                "the pushed files were removed while they were loaded; push again"
            ) from error
        self._resolver.pushed(version.served.run_id, version.served.version)
        self.retire_superseded(version.served.run_id)
        return version

    def unload(self, ref: ModelRef, tenant: str) -> None:
        """Unload a version once its last request ends. Raises VersionNotFound or CheckpointNotFound."""

        def is_meant(version: Version) -> bool:
            return version.key.ref() == ref and is_for(version.tenant, tenant)

        if not any(map(is_meant, self._table.of(HELD))):
            raise absent(ref)
        self._resolver.dropped(ref.run_id, ref.version or 0)
        self._retire(is_meant)

    def displace(self, key: VersionKey, blake3: str) -> None:
        """Displace other content under the same number: no new request uses it, and it is unloaded when idle."""
        version = self._table.find(key)
        if version is not None and version.served.blake3 != blake3:
            _log.warning("version displaced", weights=str(key.ref()), had=version.served.blake3, announced=blake3)
            self._table.move(version, VersionState.DISPLACED)
            self._leave_if_idle(version)
        # What is findable under this key now has the announced content, so this concerns evicted versions alone.
        self._retire(lambda other: other.key == key and other.served.blake3 != blake3)

    def forget_run(self, run_id: str) -> None:
        """Unload everything of a deleted run as its requests end, and refuse what is about to arrive."""
        self.arrivals.forget_run(run_id)
        self._retire(lambda version: run_of(version.key) == run_id)

    def retire_superseded(self, run_id: str) -> None:
        """Unload all but the newest versions of a run; one that is requested later is fetched again.

        Numbers above the newest come from before the trainer's volume was restored, or were pushed earlier: they are
        unloaded first.
        """
        newest = self._resolver.newest(run_id)
        held = {served.version for served in self.held() if served.run_id == run_id}
        versions = sorted(held, key=lambda version: (version <= newest, version), reverse=True)
        superseded = set(versions[self._limits.keep_per_run :]) - {0}
        self._retire(lambda version: version.key.run_id == run_id and version.key.version in superseded)

    def revived(self, lost: Sequence[Adapter]) -> None:
        """Fetch again the versions that the restarted engine could not load from their files."""
        for version in self._table:
            match version.state:
                case VersionState.ACTIVE if version.adapter in lost:
                    self._table.move(version, VersionState.LOST)
                    self._unloading.spawn(self._fetch_again(version))
                case VersionState.RETIRED if version.adapter in lost:
                    self._drop(version)  # its requests ended with the engine
                case VersionState.VERIFYING if version.adapter in lost:
                    self._table.move(version, VersionState.LOST)  # `_load` finds it so, and refuses it

    async def close(self) -> None:
        """Cancel everything in progress and finish pending writes to disk."""
        await self._fetches.close()
        await self._installing.close()
        await self._unloading.close()
        await self._disk.close()

    async def _acquire(self, ref: ModelRef, tenant: str) -> tuple[Version, bool]:
        was_loaded = True
        async with arriving_within(self._limits.fetch_timeout_seconds):
            while True:
                key = await self._resolve(ref, tenant)
                version = self._table.find(key)
                if version is not None:
                    break
                was_loaded = False
                await self.fetch(key, tenant)
        # No await between finding the version and counting the request, so it cannot be unloaded in between.
        check_owner(version.tenant, ref, tenant)
        self._table.use(version)
        return version, was_loaded

    async def _resolve(self, ref: ModelRef, tenant: str) -> VersionKey:
        try:
            return await self._resolver.resolve(ref, tenant)
        except errors.TrainerUnavailable:
            # A loaded checkpoint is served without the trainer; responses name its content by BLAKE3.
            loaded = [version.key for version in self if ref.checkpoint and version.key.checkpoint == ref.checkpoint]
            if not loaded:
                raise
            return loaded[-1]

    def _end_use(self, version: Version) -> None:
        version.requests_in_flight -= 1
        self._leave_if_idle(version)

    async def _fetch(self, key: VersionKey, tenant: str) -> Version:
        arrival = self.arrivals.expect(run_of(key))
        if (waiting := self._disk.take(key, tenant)) is not None:
            try:
                return await self._install(waiting, arrival)
            except errors.ChecksumMismatch:
                _log.warning("version damaged on disk; it is fetched again", weights=str(key.ref()))
        self._places.check(tenant)
        while True:
            with self._metrics.fetch_seconds.time(), tracing.span("fetch"):
                staged = await self._bridge.fetch(key.ref(), tenant)
            try:
                return await self._install(self._table.add(staged), arrival)
            except ReplacedError:
                _log.info("weights overwritten while they were loaded; they are fetched again", weights=str(key.ref()))

    async def _install(self, version: Version, arrival: Arrival) -> Version:
        """Load an arriving version into the engine, and return it or the one of the same content that is active.

        The registry owns its files from now on, even if this raises. One that was on disk waits on if no slot is free
        for it: it may be nowhere else.
        Loading continues if the caller is cancelled, so that the engine never holds an adapter that is not registered.
        Raises VersionExists if the key is taken by other content, Overloaded if every loaded version is in use,
        NonFinite for weights that are not finite, RunNotFound if the run is deleted meanwhile, and what the engine
        raises.
        """
        return await self._installing.run(self._load_or_release(version, arrival))

    async def _load_or_release(self, version: Version, arrival: Arrival) -> Version:
        try:
            active = self._table.find(version.key) or await self._load(version, arrival)
            # `_load` awaits nothing once the version is active. Here and in the handler it never was, or is returned.
            if active is not version:
                await version.staged.verified()
                active.staged.check_same(version.staged)
                await self._release(version)
            return active
        except BaseException as error:
            has_no_place = version.state is VersionState.ARRIVING and isinstance(error, errors.Exhausted)
            if has_no_place and self._is_only(version) and not arrival.is_deleted:
                await self._disk.put_back(version, self._release)
                raise
            if version.state is not VersionState.RELEASED:
                await self._release(version)
            if isinstance(error, FileNotFoundError):
                raise ReplacedError(
                    "the files were removed while they were loaded; ask again", field="model"
                ) from error
            raise

    async def _load(self, version: Version, arrival: Arrival) -> Version:
        """Load and verify a version; return it, or the one of the same key that became active meanwhile."""
        staged = version.staged
        numbers = asyncio.create_task(asyncio.to_thread(check_finite, staged.directory / WEIGHTS_FILE))
        try:
            async with self._loading:
                await self._free_slot(version.tenant)
                version.adapter = self._name(staged)
                with self._metrics.load_seconds.time(), tracing.span("load"):
                    version.times = await self._engine.add_adapter(version.adapter)
                self._metrics.observe_load(version.times)
                self._table.move(version, VersionState.VERIFYING)
            try:
                with tracing.span("verify"):
                    await staged.verified()
                    await numbers
                # The engine may have died since. An active version is acknowledged, and a publish may wait for that, so
                # it is active only once requests can use it: when the next engine has it, or has lost it.
                await until_alive(self._engine.check_health)
                return self._activate(version, arrival)
            finally:
                # Neither active nor lost: it is damaged, deleted, or another was faster.
                if version.state is VersionState.VERIFYING:
                    self._table.move(version, VersionState.LEAVING)
                    await self._engine.remove_adapter(version.adapter)
        finally:
            abandon(numbers)  # if loading failed, the files are about to be removed

    def _name(self, staged: StagedAdapter) -> Adapter:
        """Return the adapter that the engine loads. Its name begins its entries in the prefix cache, so it is new."""
        served, number = staged.served, next(self._adapter_ids)
        name = f"{staged.manifest.tenant}/{served.run_id}/{served.checkpoint or served.version}/{number}"
        return Adapter(number, name, staged.directory, in_memory=staged.in_memory, contents=staged)

    def _activate(self, version: Version, arrival: Arrival) -> Version:
        """Let requests find a verified version, unless its key is taken. No await: what is checked here stays true."""
        if version.state is VersionState.LOST:
            raise errors.EngineUnavailable("the engine died and lost the version")
        waiting = self._table.of({VersionState.ON_DISK}, version.key)
        for other in waiting:
            other.staged.check_same(version.staged)
        arrival.check()
        if (active := self._table.find(version.key)) is not None:
            return active
        self._table.move(version, VersionState.ACTIVE)
        for other in waiting:
            self._drop(other)
        self.listeners.notify_loaded(version)
        return version

    async def _free_slot(self, tenant: str) -> None:
        """Evict idle versions until a version of this tenant fits. Raises QuotaExceeded, Overloaded."""
        while (is_full := self._places.are_full()) or self._places.is_at_limit(tenant):
            # Wait for a version that is being unloaded rather than evict another.
            if is_full and self._places.are_clearing():
                await self._table.moved()
                continue
            idle = self._places.superfluous(tenant)
            if idle is None:
                raise self._places.none_for(tenant)
            self._table.move(idle, VersionState.EVICTING)
            await self._unload(idle)

    def _retire(self, is_meant: Callable[[Version], bool]) -> None:
        """Have versions leave: those that requests find with their last request, those that are evicted at once."""
        for version in filter(is_meant, self._table):
            match version.state:
                case VersionState.ACTIVE:
                    self._table.move(version, VersionState.RETIRED)
                    self._leave_if_idle(version)
                case VersionState.EVICTING:
                    self._table.move(version, VersionState.LEAVING)  # the task that evicts it releases it then
                case VersionState.ON_DISK:
                    self._drop(version)

    def _leave_if_idle(self, version: Version) -> None:
        if version.state in LEFT_WHEN_IDLE and not version.requests_in_flight:
            self._table.move(version, VersionState.LEAVING)
            self._unloading.spawn(self._unload(version))

    async def _unload(self, version: Version) -> None:
        """Have the engine drop a version that is EVICTING or LEAVING. Then keep its files on disk, or remove them."""
        waits = False
        try:
            await self._engine.remove_adapter(version.adapter)
            # Its files stay only if it has not been told to leave, and was not fetched again meanwhile.
            waits = version.state is VersionState.EVICTING and self._is_only(version)
        finally:
            await (self._disk.put(version, self._release) if waits else self._release(version))

    def _is_only(self, version: Version) -> bool:
        """Return whether the trainer keeps a version for this sampler, and no other one of its key."""
        return self._table.held(version.key) == [version]

    def _drop(self, version: Version) -> None:
        """Release a version at once, and remove its files in the background."""
        self._table.move(version, VersionState.RELEASED)
        self._unloading.spawn(self._discard(version))

    async def _release(self, version: Version) -> None:
        self._table.move(version, VersionState.RELEASED)
        await self._discard(version)

    async def _discard(self, version: Version) -> None:
        try:
            await version.staged.discard()
        finally:
            # Otherwise the trainer never heard of it, or other content under this key is held.
            if version.was_active and not self._table.held(version.key):
                self.listeners.notify_released(version.served)

    async def _fetch_again(self, version: Version) -> None:
        """Fetch a lost version again; only if that fails, report to the trainer that it is no longer held."""
        await version.staged.discard()
        try:
            await self.fetch(version.key)
        except errors.PacelineError as error:
            _log.warning("version lost with the engine", name=version.adapter.name, reason=error.reason)
        finally:
            await self._release(version)
