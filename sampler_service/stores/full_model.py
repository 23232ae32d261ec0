"""Store for whole models, one at a time: the engine's model is replaced for each of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from paceline import errors, tracing
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from sampler_service.engine.protocol import Adapter, LoadTimes, ModelEngine
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.base import Arrival, Lease, SingleModelStore, VersionResolver, run_of
from sampler_service.stores.model_files import ModelFiles
from sampler_service.stores.version import Version
from sampler_service.transports.base import Bridge, StagedAdapter, VersionKey, arriving_within, check_owner

_BASE = VersionKey()
_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request, or an announced version, that waits until the engine has the weights it needs."""

    key: VersionKey
    staged: StagedAdapter | None
    """None for the base model, and if the weights were loaded when the wait started."""
    announced: bool
    arrival: Arrival
    turn: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Whether it was admitted; if not, it must fetch the weights and wait again."""
    entry: Version | None = None
    """The loaded version that it was admitted to; None for the base model."""


class ModelSlot(SingleModelStore):
    """Implements Versions for an engine that holds one whole model: a run's version, a checkpoint, or the base model.

    Requests are admitted in order. A request for a model that is not loaded waits until those before it have ended;
    then the engine's model is replaced, and all requests that wait for the same model are admitted. A model that could
    not be loaded is not tried again, because its number always means the same weights.
    """

    def __init__(
        self,
        engine: ModelEngine,
        bridge: Bridge,
        resolver: VersionResolver,
        base_model: str,
        fetch_timeout_seconds: float,
        set_ready: Callable[[bool], Awaitable[None]],
        metrics: SamplerMetrics,
    ) -> None:
        """`set_ready` sets the service's readiness, which is off while the engine has no model."""
        super().__init__()
        self._engine = engine
        self._resolver = resolver
        self._base = ServedModel(base_model)
        self._base_path = engine.model_path
        self._fetch_timeout = fetch_timeout_seconds
        self._set_ready = set_ready
        self._metrics = metrics
        self._key: VersionKey | None = _BASE
        """What the engine holds; None for a model that was displaced or whose run was deleted, which nobody can use."""
        self._queue: deque[_Waiter] = deque()
        self._switching: asyncio.Task[None] | None = None
        self._refused: dict[VersionKey, str] = {}
        """Models that could not be loaded, with their BLAKE3."""
        self._files = ModelFiles(bridge)
        self._numbers = count(1)
        metrics.requests_queued.set_function(lambda: len(self._queue))
        metrics.rebuilding.set_function(lambda: self._switching is not None)

    def serves(self, ref: ModelRef) -> bool:
        return self._key == (_BASE if ref.is_base else VersionKey(ref.run_id, ref.version or 0))

    def find(self, key: VersionKey) -> Version | None:
        return self._entry if key == self._key else None

    @asynccontextmanager
    async def lease(self, ref: ModelRef, tenant: str) -> AsyncIterator[Lease]:
        """Load a model and keep it loaded. Raises as `VersionRegistry.lease`, and ModelNotLoadable."""
        await self._engine.check_health()
        start = perf_counter()
        key = _BASE if ref.is_base else await self._resolver.resolve(ref, tenant)
        was_loaded = key == self._key
        async with self._hold(key, tenant) as (entry, release):
            milliseconds = 0.0 if was_loaded else 1e3 * (perf_counter() - start)
            yield Lease(entry.served if entry else self._base, load_milliseconds=milliseconds, release=release)

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> Version:
        """Load a model. Raises as `lease`, and EngineUnavailable if a newer one was announced before its turn."""
        async with self._hold(key, tenant, announced=True) as (entry, _):
            if entry is None:
                raise errors.InvalidArgument("the base model is not a version", field="model")
            return entry

    def displace(self, key: VersionKey, blake3: str) -> None:
        """Displace other content under the same number; requests in progress end on it."""
        if self._refused.get(key, blake3) != blake3:
            del self._refused[key]
        if self._entry is not None and key == self._key and self._entry.served.blake3 != blake3:
            _log.warning("model displaced", weights=str(key.ref()), announced=blake3)
            self._replace(None)

    def forget_run(self, run_id: str) -> None:
        self.arrivals.forget_run(run_id)
        if self._entry is not None and run_of(self._entry.key) == run_id:
            self._replace(None)

    def revived(self, lost: Sequence[Adapter]) -> None:
        """Forget a model that had overwritten the one the engine was built from; it is fetched again on request."""
        if self._engine.model_path == self._base_path and self._key != _BASE:
            self._replace(_BASE)
            self._advance()

    async def close(self) -> None:
        await self._files.close()
        if self._switching is not None:
            self._switching.cancel()
            await asyncio.gather(self._switching, return_exceptions=True)

    @asynccontextmanager
    async def _hold(
        self, key: VersionKey, tenant: str, *, announced: bool = False
    ) -> AsyncIterator[tuple[Version | None, Callable[[], None]]]:
        """Keep the weights of `key` in the engine; yield their entry (None for the base model) and an early release."""
        entered, arrival = False, self.arrivals.expect(run_of(key))
        while not entered:
            with self._files.needed(key):
                waiter = _Waiter(key, await self._stage(key, tenant), announced, arrival)
                entered = await self._enter(waiter)
        with ExitStack() as resources:
            resources.callback(self._leave, waiter)
            if waiter.entry is not None:
                check_owner(waiter.entry.tenant, key.ref(), tenant)
            yield waiter.entry, resources.close

    async def _stage(self, key: VersionKey, tenant: str) -> StagedAdapter | None:
        """Fetch and verify weights that are not loaded, before they enter the queue. Return None if none are needed."""
        if key in self._refused:
            raise errors.ModelNotLoadable("the engine could not load this model before; publish another", field="model")
        if key in {_BASE, self._key}:
            return None
        with self._metrics.fetch_seconds.time(), tracing.span("fetch"):
            async with arriving_within(self._fetch_timeout):
                staged = await self._files.fetch(key, tenant)
        check_owner(staged.manifest.tenant, key.ref(), tenant)
        return staged

    async def _enter(self, waiter: _Waiter) -> bool:
        self._queue.append(waiter)
        self._advance()
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            # It may have been admitted just before the cancellation; then its place must be released.
            if not waiter.turn.cancelled() and waiter.turn.exception() is None and waiter.turn.result():
                self._leave(waiter)
            raise

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.entry is not None:
            waiter.entry.requests_in_flight -= 1
        self._end_use()

    def _advance(self) -> None:
        """Admit waiters in order while the engine has their model; then start replacing the model for the next one."""
        while self._queue and self._switching is None:
            head = self._queue[0]
            # A waiter without files is dequeued too: it fetches them and waits again.
            if head.turn.done() or head.key == self._key or not self._can_switch(head):
                self._queue.popleft()
                self._admit(head)
            else:
                self._switching = asyncio.create_task(self._switch(head))

    def _admit(self, waiter: _Waiter) -> None:
        if waiter.turn.done():
            return
        is_loaded = waiter.key == self._key
        if is_loaded:
            waiter.entry = self._entry
            if waiter.entry is not None:
                waiter.entry.requests_in_flight += 1
            self._begin_use()
        waiter.turn.set_result(is_loaded)

    def _can_switch(self, head: _Waiter) -> bool:
        """Return whether a waiter has files to load. Fails the wait of an announced version that is superseded."""
        if head.announced and head.key.version and head.key.version < self._resolver.newest(head.key.run_id):
            # This reason tells the publish that the version exists although this sampler did not load it.
            head.turn.set_exception(errors.EngineUnavailable("a newer version came before this one was loaded"))
        return not head.turn.done() and (head.key == _BASE or head.staged is not None)

    async def _switch(self, head: _Waiter) -> None:
        """Replace the model when the requests in progress have ended, and admit all that wait for it."""
        with self._files.needed(head.key):
            await self._change(head)

    async def _change(self, head: _Waiter) -> None:
        failure: errors.PacelineError | None = None
        try:
            start = perf_counter()
            await self._idle.wait()
            await self._set_ready(False)
            idle = perf_counter()
            head.arrival.check()
            with self._metrics.load_seconds.time(), tracing.span("load"):
                staged = head.staged
                await self._engine.change_model(staged.directory if staged else self._base_path, staged)
            self._loaded(head, LoadTimes(1e3 * (idle - start), 1e3 * (perf_counter() - idle)))
        except errors.PacelineError as error:
            failure = error
            if isinstance(error, errors.ModelNotLoadable):
                self._refused[head.key] = head.staged.served.blake3 if head.staged else ""
        except Exception:
            _log.exception("model not changed", weights=str(head.key.ref()))
            failure = errors.Internal("the model could not be changed")
        self._switching = None
        await self._set_ready(not isinstance(failure, errors.EngineUnavailable))
        for waiter in [waiter for waiter in self._queue if waiter.key == head.key]:
            self._queue.remove(waiter)
            if failure is None:
                self._admit(waiter)
            elif not waiter.turn.done():
                waiter.turn.set_exception(type(failure)(failure.message, field=failure.field))
        self._advance()

    def _loaded(self, head: _Waiter, times: LoadTimes) -> None:
        self._replace(None if head.arrival.is_deleted else head.key)
        head.arrival.check()
        if head.staged is not None:
            adapter = Adapter(next(self._numbers), str(head.key.ref()), head.staged.directory)
            self.listeners.notify_loaded(self._activate(head.staged, adapter, times))
        _log.info("model loaded", weights=str(head.key.ref()))

    def _replace(self, key: VersionKey | None) -> None:
        """Drop the loaded entry for what the engine holds now, and report its release: its files may be deleted."""
        self._key = key
        self._release_entry()
