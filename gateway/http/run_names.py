"""The names of runs, known without asking the trainer each time, and while it is away."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from gateway.http.services import Services
from paceline import codec, errors
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import Run

NAME = "name"
"""Metadata key of a run's name, by which clients may call it."""
ONLINE = {"api": "online"}
"""Metadata of runs that start from the base model's weights and publish them first."""
_PAGE = 1000
_READ_AGAIN_SECONDS = 5.0
"""Age at which names are read again in the background: another gateway may have had runs changed."""
OLD_SECONDS = 60.0
"""Age at which names are not used before they were read again, if the trainer answers."""
_PATIENCE_SECONDS = 2.0
"""How long a known name waits for the trainer."""
MOST_TENANTS = 1024
_MOST_RUNS = 10_000
"""Newest runs of a tenant that are known by name."""


@dataclass(frozen=True, slots=True)
class NamedRun:
    """What a name needs to know of its run."""

    run_id: str
    name: str
    created: float
    latest_version: int
    is_online: bool

    @classmethod
    def of(cls, run: Run) -> NamedRun:
        """Return what is kept of a run."""
        is_online = ONLINE.items() <= run.user_metadata.items()
        name = run.user_metadata.get(NAME, "")
        return cls(run.run_id, name, run.create_time.timestamp(), run.latest_version, is_online)


@dataclass(frozen=True, slots=True)
class KnownRuns:
    """A tenant's runs, newest first, as the trainer last listed them."""

    runs: Sequence[NamedRun]
    by_name: Mapping[str, NamedRun]
    """The newest run of each name, preferring runs that have published."""
    changes: int
    """How often the tenant's runs had been changed through this gateway before they were listed."""
    read: float


class RunNames:
    """Knows the names of each tenant's runs.

    They are read again once a call through this gateway may have changed them, so that a new run of a name is found at
    once, and a few seconds after they were read, since another gateway may have had runs changed. While the trainer is
    away what was known last holds.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: OrderedDict[str, KnownRuns] = OrderedDict()
        """By tenant, the one that used names last at the end."""
        self._reading: dict[str, asyncio.Task[KnownRuns]] = {}

    async def find(self, tenant: str, name: str) -> NamedRun | None:
        """Return the run with a name, or None. Raises what the trainer answers if the name is not known."""
        known = self._known.get(tenant)
        if known is not None and name in known.by_name:
            known = await self._refreshed(tenant, known)
        else:
            known = await self._read(tenant)
        return known.by_name.get(name)

    def known(self, tenant: str) -> Sequence[NamedRun]:
        """Return the runs that are known without the trainer, newest first."""
        known = self._known.get(tenant)
        return known.runs if known is not None else ()

    async def _refreshed(self, tenant: str, known: KnownRuns) -> KnownRuns:
        """Return what is known, read again first if it may be wrong and the trainer answers."""
        if not self._services.router.trainer.ready:
            return known
        age = monotonic() - known.read
        if known.changes != self._services.router.run_changes[tenant] or age > OLD_SECONDS:
            with suppress(errors.Unavailable, errors.TimedOut, TimeoutError):
                return await asyncio.wait_for(self._read(tenant), _PATIENCE_SECONDS)
        elif age > _READ_AGAIN_SECONDS:
            self._start(tenant)
        return known

    async def _read(self, tenant: str) -> KnownRuns:
        """Return the runs as the trainer lists them from now on; callers at the same time share a list."""
        reading = self._reading.get(tenant)
        if reading is not None and not reading.done():
            # It may have begun before the change that the caller has seen.
            await asyncio.wait({reading})
        return await asyncio.shield(self._start(tenant))

    def _start(self, tenant: str) -> asyncio.Task[KnownRuns]:
        reading = self._reading.get(tenant)
        if reading is None or reading.done():
            reading = self._reading[tenant] = asyncio.create_task(self._list(tenant))
            reading.add_done_callback(lambda done: self._ended(tenant, done))
        return reading

    def _ended(self, tenant: str, reading: asyncio.Task[KnownRuns]) -> None:
        if self._reading.get(tenant) is reading:
            del self._reading[tenant]
        if not reading.cancelled():
            reading.exception()  # a caller that waits raises it; without one, what was known still holds

    async def _list(self, tenant: str) -> KnownRuns:
        changes, runs = self._services.router.run_changes[tenant], list[NamedRun]()
        request = pb.ListRunsRequest(page_size=_PAGE)
        while len(runs) < _MOST_RUNS:
            page = await self._services.call(tenant, request, pb.ListRunsResponse)
            runs += [NamedRun.of(codec.run_from_proto(run)) for run in page.runs]
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        by_name = {run.name: run for run in reversed(runs) if run.name}
        by_name |= {run.name: run for run in reversed(runs) if run.name and run.latest_version}
        known = self._known[tenant] = KnownRuns(runs, by_name, changes, monotonic())
        self._known.move_to_end(tenant)
        if len(self._known) > MOST_TENANTS:
            self._known.popitem(last=False)
        return known
