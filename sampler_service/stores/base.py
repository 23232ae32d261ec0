"""What the stores of weights share: their protocol, leases, the newest version of each run, and fetches in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from paceline import errors
from paceline.codec.models import served_model_from_proto
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from sampler_service.engine.protocol import Adapter, LoadTimes
from sampler_service.stores.version import Version, VersionState, VersionTable
from sampler_service.transports.base import Bridge, StagedAdapter, VersionKey

T = TypeVar("T")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """Weights that stay loaded while a request uses them."""

    served: ServedModel
    adapter: Adapter | None = None
    """None for the base model."""
    load_milliseconds: float = 0.0
    """Time that loading took; 0 if the weights were already loaded."""
    release: Callable[[], None] = lambda: None
    """Releases the weights before the lease ends, once the engine has finished the request. Idempotent."""
    is_current: Callable[[], bool] = lambda: True
    """Whether the engine still computes with these weights; in-place writes may have replaced them."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Arrival:
    """Weights that are on their way into the engine."""

    run_id: str
    is_deleted: bool = False
    """Whether their run was deleted meanwhile."""

    def check(self) -> None:
        """Refuse weights whose run was deleted, before a request can find them. Raises RunNotFound."""
        if self.is_deleted:
            raise errors.RunNotFound.deleted("model.version.run_id")


class Arrivals:
    """All weights that are on their way."""

    def __init__(self) -> None:
        self._arrivals: WeakSet[Arrival] = WeakSet()

    def expect(self, run_id: str) -> Arrival:
        """Register weights of a run; they are on their way as long as the caller keeps the result."""
        arrival = Arrival(run_id)
        self._arrivals.add(arrival)
        return arrival

    def forget_run(self, run_id: str) -> None:
        """Have what is on its way of a deleted run refused."""
        for arrival in self._arrivals:
            arrival.is_deleted |= arrival.run_id == run_id


class Versions(Protocol):
    """The weights that the engine holds.

    VersionRegistry holds many adapters, ModelSlot one whole model at a time, InPlaceSlot one that is updated in place.
    """

    listeners: Listeners
    arrivals: Arrivals

    def __len__(self) -> int:
        """Return the number of loaded versions and checkpoints; the base model does not count."""
        ...

    def __iter__(self) -> Iterator[Version]:
        """Yield the loaded versions and checkpoints."""
        ...

    def find(self, key: VersionKey) -> Version | None:
        """Return the loaded version with this key, if any."""
        ...

    def held(self) -> Iterator[ServedModel]:
        """Yield what the trainer must keep for this sampler: everything that is loaded or waits on disk."""
        ...

    def lease(self, ref: ModelRef, tenant: str) -> AbstractAsyncContextManager[Lease]:
        """Keep the weights that `ref` names loaded while the block runs, fetching them first if necessary."""
        ...

    async def fetch(self, key: VersionKey, tenant: str = PEER_TENANT) -> Version:
        """Fetch weights and load them."""
        ...

    async def install(self, staged: StagedAdapter, arrival: Arrival) -> Version:
        """Load weights that were pushed. The store owns their files from now on, even if this raises.

        `arrival` was registered before their bytes arrived.
        """
        ...

    def serves(self, ref: ModelRef) -> bool:
        """Return whether a request for these weights can be answered without replacing the loaded ones."""
        ...

    def displace(self, key: VersionKey, blake3: str) -> None:
        """Displace content under the same number other than `blake3`: no new request uses it."""
        ...

    def unload(self, ref: ModelRef, tenant: str) -> None:
        """Unload weights once their last request ends."""
        ...

    def forget_run(self, run_id: str) -> None:
        """Unload everything of a deleted run as its requests end, and refuse what is about to arrive."""
        ...

    def retire_superseded(self, run_id: str) -> None:
        """Unload all but the newest versions of a run."""
        ...

    def revived(self, lost: Sequence[Adapter]) -> None:
        """Record that the engine was restarted without the `lost` adapters.

        An engine for whole models has the model that it was built from.
        """
        ...

    async def close(self) -> None:
        """Cancel everything in progress."""
        ...


class SingleModelStore:
    """The part of a store that holds one model at a time: its version, and the number of requests that use it."""

    def __init__(self) -> None:
        self._table = VersionTable()
        self._in_use = 0
        self._idle = asyncio.Event()
        """Set while no request uses the model."""
        self._idle.set()
        self.listeners = Listeners()
        self.arrivals = Arrivals()

    def __len__(self) -> int:
        return self._table.num_findable()

    def __iter__(self) -> Iterator[Version]:
        return iter(self._table.findable())

    def held(self) -> Iterator[ServedModel]:
        return (version.served for version in self)

    async def install(self, staged: StagedAdapter, arrival: Arrival) -> Version:
        await staged.discard()
        raise errors.Unsupported("this sampler serves whole models, which are not pushed", field="model")

    def unload(self, ref: ModelRef, tenant: str) -> None:
        raise errors.Unsupported("this sampler has one model; load or publish another in its place", field="model")

    def retire_superseded(self, run_id: str) -> None:
        """Do nothing: each version replaces the previous one."""

    @property
    def _entry(self) -> Version | None:
        """The version that the engine holds; None for the base model, and for weights that nobody can use."""
        return next(iter(self._table.findable()), None)

    def _activate(self, staged: StagedAdapter, adapter: Adapter, times: LoadTimes) -> Version:
        """Let requests find weights that the engine has loaded, and that were verified before or while it did."""
        version = self._table.add(staged)
        version.adapter, version.times = adapter, times
        self._table.move(version, VersionState.VERIFYING)
        self._table.move(version, VersionState.ACTIVE)
        return version

    def _release_entry(self) -> None:
        """Report that the engine's weights are other ones now; their files may be deleted."""
        if (entry := self._entry) is not None:
            self._table.move(entry, VersionState.RELEASED)
            self.listeners.notify_released(entry.served)

    def _begin_use(self) -> None:
        self._in_use += 1
        self._idle.clear()

    def _end_use(self) -> None:
        self._in_use -= 1
        if not self._in_use:
            self._idle.set()


class Listeners:
    """Callbacks for versions that are loaded, and for those that are neither loaded nor on disk any more."""

    def __init__(self) -> None:
        self.loaded: list[Callable[[Version], None]] = []
        self.released: list[Callable[[ServedModel], None]] = []

    def notify_loaded(self, entry: Version) -> None:
        """Report that a version was loaded."""
        served = entry.served
        _log.info("version loaded", run=served.run_id, version=served.version, checkpoint=served.checkpoint)
        for listener in self.loaded:
            listener(entry)

    def notify_released(self, served: ServedModel) -> None:
        """Report that a version is neither loaded nor on disk any more."""
        _log.info("version released", run=served.run_id, version=served.version, checkpoint=served.checkpoint)
        for listener in self.released:
            listener(served)


class VersionResolver:
    """Tracks the newest version of every run: the one that the trainer announced last, or one pushed after that.

    A pushed number, however high, is the newest only until the trainer's next version, and only while it is held: it
    may be nowhere else.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._newest: dict[str, int] = {}
        """Version of each run that was announced last, by this trainer or by the one before."""
        self._pushed: dict[str, set[int]] = {}
        """Held versions of each run that were pushed since."""
        self._announced: dict[str, int] = {}
        """Highest version of each run that this trainer announced."""
        self._trainer = ""

    def welcomed(self, trainer_instance: str, held: Set[VersionKey]) -> None:
        """Record which trainer instance announces from now on. A new one's numbers may be lower and are still valid.

        What was announced and is not held may never come back, so the trainer is asked for the newest version instead.
        """
        if trainer_instance != self._trainer:
            self._trainer = trainer_instance
            self._announced.clear()
            self._newest = {run: number for run, number in self._newest.items() if VersionKey(run, number) in held}
            for run, numbers in self._pushed.items():
                self._pushed[run] = {number for number in numbers if VersionKey(run, number) in held}

    def announced(self, run_id: str, version: int, newest: int) -> bool:
        """Record that the trainer announced a version; return whether to go on to it.

        The run's newest version does not exceed `newest`. It may be on its way to the volume, or be one that the
        trainer still has to make again after a crash. Meanwhile a sampler goes on to an older one only from one that is
        older still.
        """
        if version < newest and not 0 < self.newest(run_id) < version:
            return False
        last = self.last_announced(run_id)
        if version > last:
            self._announced[run_id] = self._newest[run_id] = version
            self._pushed.pop(run_id, None)
        return version >= last

    def pushed(self, run_id: str, version: int) -> None:
        """Record that a version was pushed, which the trainer did not announce."""
        self._pushed.setdefault(run_id, set()).add(version)

    def dropped(self, run_id: str, version: int) -> None:
        """Record that a version is unloaded; one that was pushed is not the newest any more."""
        if (pushed := self._pushed.get(run_id)) is not None:
            pushed.discard(version)

    def newest(self, run_id: str) -> int:
        """Return the newest known version; 0 if there is none."""
        return max(self._newest.get(run_id, 0), *self._pushed.get(run_id, ()), 0)

    def last_announced(self, run_id: str) -> int:
        """Return the highest version that this trainer announced; 0 if it announced none."""
        return self._announced.get(run_id, 0)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._newest.pop(run_id, None)
        self._pushed.pop(run_id, None)
        self._announced.pop(run_id, None)

    async def resolve(self, ref: ModelRef, tenant: str) -> VersionKey:
        """Return the key of the exact weights that `ref` names.

        The bridge is asked for what announcements do not tell: the newest version of an unknown run, and the content of
        a checkpoint, which may have been overwritten or deleted. Raises as `Bridge.describe`.
        """
        if ref.run_id and ref.version is not None:
            return VersionKey(run_id=ref.run_id, version=ref.version)
        if newest := self.newest(ref.run_id):
            return VersionKey(run_id=ref.run_id, version=newest)
        return VersionKey.of(served_model_from_proto((await self._bridge.describe(ref, tenant)).model))


class SharedFetches(Generic[T]):
    """Fetches in progress, by key and by the tenant that they run for; callers that ask for the same key share one.

    A fetch may fail for one tenant and succeed for another, so a tenant shares only its own fetches and the sampler's.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[VersionKey, str], asyncio.Task[T]] = {}

    async def join(self, key: VersionKey, tenant: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the fetch in progress, or start one. The fetch continues if a caller is cancelled."""
        running = (self._tasks.get((key, owner)) for owner in (PEER_TENANT, tenant))
        # A fetch that has ended stays in the table until its callback runs. A caller that joins it in a loop never lets
        # the callback run, because awaiting an ended task does not suspend.
        task = next((each for each in running if each is not None and not each.done()), None)
        if task is None:
            task = self._tasks[key, tenant] = asyncio.create_task(start())
            task.add_done_callback(lambda done: self._ended(key, tenant, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel all fetches."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: VersionKey, tenant: str, task: asyncio.Task[T]) -> None:
        if self._tasks.get((key, tenant)) is task:
            del self._tasks[key, tenant]
        if not task.cancelled():
            task.exception()  # waiters raise it; if there are none, asyncio must not report it as never retrieved


def run_of(key: VersionKey) -> str:
    """Return the run that weights come from."""
    return CheckpointPath.parse(key.checkpoint).run_id if key.checkpoint else key.run_id
