"""Fair queue in front of the engine: next is the tenant that has recently been served least.

The engine itself runs requests in order of arrival. It gets only about as many as it can run, enough to keep it busy,
and the rest wait here, so that a tenant with one request does not wait behind another's thousand.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _TenantRequests:
    """A tenant's waiting requests."""

    served: float = 0.0
    """The tenant's virtual time, in completions served, on a clock that all tenants share."""
    waiting: OrderedDict[asyncio.Future[None], int] = field(default_factory=OrderedDict)
    """Waiting requests in order of arrival, with their numbers of completions."""
    is_queued: bool = False
    held: int = 0
    """Completions of this tenant in the engine."""


class HeldPlaces:
    """The places of one request, released as its completions end."""

    def __init__(self, queue: TenantQueue, requests: _TenantRequests, completions: int) -> None:
        self._queue = queue
        self._requests = requests
        self._completions = completions

    def ended(self, completions: int = 1) -> None:
        """Release places, at most as many as are still held."""
        given = min(completions, self._completions)
        self._completions -= given
        self._queue.release(self._requests, given)

    def end(self) -> None:
        """Release all places that are still held."""
        self.ended(self._completions)


class TenantQueue:
    """Start-time fair queueing over tenants (Goyal, Vin, Cheng 1996), with a completion as the unit of work.

    With `first_at_once`, a tenant that has nothing in the engine waits for no other: its next request is admitted
    beyond the places. Otherwise one request of many completions, which takes all places at a time, would hold every
    other tenant up until it ends. A request costs O(log number of waiting tenants).
    """

    def __init__(self, places: int, *, first_at_once: bool = False) -> None:
        """Admit requests while fewer than `places` completions are in the engine."""
        self._places = places
        self._first_at_once = first_at_once
        self._taken = 0
        self._clock = 0.0
        """Virtual time: the start time of the latest request served."""
        self._tenants: dict[str, _TenantRequests] = {}
        self._order: list[tuple[float, int, _TenantRequests]] = []
        """Heap of tenants with waiting requests, least served first; ties go to the earlier arrival."""
        self._arrivals = 0
        self.waiting = 0
        """Number of waiting completions."""

    @asynccontextmanager
    async def places(self, tenant: str, completions: int) -> AsyncIterator[HeldPlaces]:
        """Wait for a turn, and hold its places until each completion, or the block, ends."""
        requests = self._tenants.setdefault(tenant, _TenantRequests())
        # An idle tenant must not save up credit and then starve the others.
        if not requests.waiting:
            requests.served = max(requests.served, self._clock)
        is_first = self._first_at_once and not requests.held and not requests.waiting
        if is_first or not (self._order or self._taken >= self._places):
            self._serve(requests, completions)
        else:
            await self._wait(requests, completions)
        places = HeldPlaces(self, requests, completions)
        try:
            yield places
        finally:
            places.end()

    def release(self, requests: _TenantRequests, completions: int) -> None:
        """Release a tenant's places and admit the requests whose turn has come."""
        self._taken -= completions
        requests.held -= completions
        while self._first_at_once and requests.waiting and not requests.held:
            self._serve_next(requests)
        while self._order and self._taken < self._places:
            _, _, requests = heapq.heappop(self._order)
            requests.is_queued = False
            if requests.waiting:  # otherwise all of its requests were cancelled, or served at once
                self._serve_next(requests)
                self._queue(requests)

    def _serve_next(self, requests: _TenantRequests) -> None:
        place, completions = requests.waiting.popitem(last=False)
        self.waiting -= completions
        # A request cancelled in this iteration of the event loop has not left the queue yet.
        if not place.cancelled():
            self._serve(requests, completions)
            place.set_result(None)

    async def _wait(self, requests: _TenantRequests, completions: int) -> None:
        place = asyncio.get_running_loop().create_future()
        requests.waiting[place] = completions
        self.waiting += completions
        self._queue(requests)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # its turn came just before the cancellation: the places are taken
                self.release(requests, completions)
            elif requests.waiting.pop(place, None) is not None:
                self.waiting -= completions
            raise

    def _queue(self, requests: _TenantRequests) -> None:
        if requests.waiting and not requests.is_queued:
            self._arrivals += 1
            requests.is_queued = True
            heapq.heappush(self._order, (requests.served, self._arrivals, requests))

    def _serve(self, requests: _TenantRequests, completions: int) -> None:
        self._taken += completions
        self._clock = max(self._clock, requests.served)
        requests.served += completions
        requests.held += completions
