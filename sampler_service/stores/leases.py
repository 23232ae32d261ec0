"""What a sampler holds, and what a request holds of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.types import ServedModel
from sampler_service.engine.protocol import Adapter, LoadTimes
from sampler_service.transports.base import StagedAdapter

_log = get_logger(__name__)


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
    release: Callable[[], None] = lambda: None
    """Gives the weights up before the lease ends: the engine has done with the request. May be called again."""
    is_current: Callable[[], bool] = lambda: True
    """Whether the engine still computes with them: other weights may be written in their place."""


class Departures:
    """Counts what is leaving the engine, which takes a step, and has those wait who need the room."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one while the block runs."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._ended.set()

    async def next(self) -> None:
        """Return when one of them has left."""
        self._ended.clear()
        await self._ended.wait()


class Listeners:
    """Who is to know what is loaded, and what is held no more."""

    def __init__(self) -> None:
        self.loaded: list[Callable[[LoadedVersion], None]] = []
        self.released: list[Callable[[ServedModel], None]] = []

    def tell_loaded(self, entry: LoadedVersion) -> None:
        """Call them after each loading."""
        served = entry.served
        _log.info("version loaded", run=served.run_id, version=served.version, checkpoint=served.checkpoint)
        for listener in self.loaded:
            listener(entry)

    def tell_released(self, served: ServedModel) -> None:
        """Call them when something is neither loaded nor waits on disk."""
        _log.info("version released", run=served.run_id, version=served.version, checkpoint=served.checkpoint)
        for listener in self.released:
            listener(served)


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """How much is kept, and how long a request waits."""

    max_loaded: int
    """Versions in the engine."""
    keep_per_run: int
    """Newest versions of a run that stay although no request uses them."""
    fetch_timeout_seconds: float
    max_per_tenant: int = 0
    """Versions of one tenant in the engine, also when it is alone; 0 means as many as in all."""


def run_of(served: ServedModel) -> str:
    """Return the run that weights come from."""
    return CheckpointPath.parse(served.checkpoint).run_id if served.checkpoint else served.run_id
