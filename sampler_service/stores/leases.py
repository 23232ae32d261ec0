"""Loaded versions, and the leases that requests hold on them."""

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
    """An adapter, or a whole model, that the engine holds."""

    served: ServedModel
    tenant: str
    adapter: Adapter
    staged: StagedAdapter
    times: LoadTimes
    requests_in_flight: int = 0
    retired: bool = False
    """Whether it is unloaded when its last request ends."""

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
    """Time that loading took; 0 if the weights were already loaded."""
    release: Callable[[], None] = lambda: None
    """Releases the weights before the lease ends, once the engine has finished the request. Idempotent."""
    is_current: Callable[[], bool] = lambda: True
    """Whether the engine still computes with these weights; in-place writes may have replaced them."""


class Departures:
    """Counts versions being unloaded, which takes a step of the engine, so that callers can wait for their room."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one departure while the block runs."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._ended.set()

    async def next(self) -> None:
        """Return when the next departure has ended."""
        self._ended.clear()
        await self._ended.wait()


class Listeners:
    """Callbacks for versions that are loaded, and for those that are no longer held."""

    def __init__(self) -> None:
        self.loaded: list[Callable[[LoadedVersion], None]] = []
        self.released: list[Callable[[ServedModel], None]] = []

    def tell_loaded(self, entry: LoadedVersion) -> None:
        """Report that a version was loaded."""
        served = entry.served
        _log.info("version loaded", run=served.run_id, version=served.version, checkpoint=served.checkpoint)
        for listener in self.loaded:
            listener(entry)

    def tell_released(self, served: ServedModel) -> None:
        """Report that a version is neither loaded nor on disk any more."""
        _log.info("version released", run=served.run_id, version=served.version, checkpoint=served.checkpoint)
        for listener in self.released:
            listener(served)


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


def run_of(served: ServedModel) -> str:
    """Return the run that weights come from."""
    return CheckpointPath.parse(served.checkpoint).run_id if served.checkpoint else served.run_id
