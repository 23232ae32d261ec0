"""Whose completions the engine gets next: those of the tenant that has had the least of late.

The engine takes requests in the order in which they come. It is given about as many as it can run, so that it never
waits for one, and the rest wait here: a tenant with one request does not stand behind another's thousand.
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
    """A tenant's requests that wait, in order of arrival, with their completions."""

    served: float = 0.0
    """What the tenant has had, in completions, on a clock that all tenants share."""
    waiting: OrderedDict[asyncio.Future[None], int] = field(default_factory=OrderedDict)
    is_queued: bool = False


class HeldPlaces:
    """The places of one request, which it gives back as its completions end."""

    def __init__(self, queue: TenantQueue, completions: int) -> None:
        self._queue = queue
        self._completions = completions

    def ended(self, completions: int = 1) -> None:
        """Give places back, as many as it still has at most."""
        given = min(completions, self._completions)
        self._completions -= given
        self._queue.release(given)

    def end(self) -> None:
        """Give all places back."""
        self.ended(self._completions)


class TenantQueue:
    """Start-time fair queueing over tenants (Goyal, Vin, Cheng 1996), with a completion as the unit of work.

    A request costs O(log tenants that wait).
    """

    def __init__(self, places: int) -> None:
        """Let requests in as long as fewer completions than `places` are in the engine."""
        self._places = places
        self._taken = 0
        self._clock = 0.0
        """What the tenant that was served last had had before."""
        self._tenants: dict[str, _TenantRequests] = {}
        self._order: list[tuple[float, int, _TenantRequests]] = []
        """Lines with somebody in them, the one served least first; of two the one that came first."""
        self._arrivals = 0
        self.waiting = 0
        """Completions that wait."""

    @asynccontextmanager
    async def places(self, tenant: str, completions: int) -> AsyncIterator[HeldPlaces]:
        """Wait for a turn, and hold its places until each completion, or the block, ends."""
        requests = self._tenants.setdefault(tenant, _TenantRequests())
        if not requests.waiting:
            requests.served = max(requests.served, self._clock)
        if self._order or self._taken >= self._places:
            await self._wait(requests, completions)
        else:
            self._serve(requests, completions)
        places = HeldPlaces(self, completions)
        try:
            yield places
        finally:
            places.end()

    def release(self, completions: int) -> None:
        """Give places back, and let in those whose turn has come."""
        self._taken -= completions
        while self._order and self._taken < self._places:
            _, _, requests = heapq.heappop(self._order)
            requests.is_queued = False
            if requests.waiting:  # else all who waited have left
                place, following = requests.waiting.popitem(last=False)
                self.waiting -= following
                # One that was cancelled in this turn of the loop has not left the line yet.
                if not place.cancelled():
                    self._serve(requests, following)
                    place.set_result(None)
                self._queue(requests)

    async def _wait(self, requests: _TenantRequests, completions: int) -> None:
        place = asyncio.get_running_loop().create_future()
        requests.waiting[place] = completions
        self.waiting += completions
        self._queue(requests)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # its turn came in the same moment
                self.release(completions)
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
