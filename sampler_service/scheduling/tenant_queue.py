"""Fair queue in front of the engine: next is the tenant that has recently been served least.

The engine gets only about as many completions as it can run, enough to keep it busy, and the rest wait here, so that a
tenant with one request does not wait behind another's thousand. Those that wait in the engine have a priority of the
same share, so that they do not wait behind another's either.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sampler_service.engine.protocol import AT_ONCE


@dataclass(slots=True)
class _TenantRequests:
    """A tenant's waiting requests."""

    served: int = 0
    """The tenant's virtual time, in completions served, on a clock that all tenants share."""
    waiting: OrderedDict[asyncio.Future[int], int] = field(default_factory=OrderedDict)
    """Waiting requests in order of arrival, with their numbers of completions."""
    is_queued: bool = False
    running: int = 0
    """Completions of this tenant in the engine."""


class TakenPlaces:
    """The places of one request, released as its completions end."""

    def __init__(self, queue: TenantQueue, requests: _TenantRequests, completions: int, priority: int) -> None:
        """`priority` is that of the first of these completions in the engine."""
        self.priority = priority
        self._queue = queue
        self._requests = requests
        self._completions = completions
        self._turn = priority % AT_ONCE

    def ended(self, completions: int = 1) -> None:
        """Release places, at most as many as are still taken."""
        given = min(completions, self._completions)
        self._turn += given
        self._queue.reached(self._turn)
        self._release(given)

    def end(self) -> None:
        """Release all places that are still taken."""
        self.ended(self._completions)

    def give_up(self) -> None:
        """Release all places that are still taken, by completions that nobody waits for any more."""
        self._release(self._completions)

    def _release(self, completions: int) -> None:
        self._completions -= completions
        self._queue.release(self._requests, completions)


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
        self._clock = 0
        """Virtual time: the latest start time of what has ended. What was served later may still wait in the engine."""
        self._tenants: dict[str, _TenantRequests] = {}
        self._order: list[tuple[int, int, _TenantRequests]] = []
        """Heap of tenants with waiting requests, least served first; ties go to the earlier arrival."""
        self._arrivals = 0
        self.waiting = 0
        """Number of waiting completions."""

    def by_tenant(self) -> dict[str, tuple[int, int]]:
        """Return the completions that wait, and those in the engine, of each tenant that has any. Thread-safe."""
        numbers = {tenant: (sum(list(of.waiting.values())), of.running) for tenant, of in list(self._tenants.items())}
        return {tenant: pair for tenant, pair in numbers.items() if any(pair)}

    @asynccontextmanager
    async def places(self, tenant: str, completions: int) -> AsyncIterator[TakenPlaces]:
        """Wait for a turn, and keep its places until each completion, or the block, ends."""
        requests = self._tenants.setdefault(tenant, _TenantRequests())
        # An idle tenant must not save up credit and then starve the others.
        if not requests.waiting:
            requests.served = max(requests.served, self._clock)
        is_first = self._first_at_once and not requests.running and not requests.waiting
        if is_first or not (self._order or self._taken >= self._places):
            priority = self._serve(requests, completions)
        else:
            priority = await self._wait(requests, completions)
        places = TakenPlaces(self, requests, completions, priority)
        try:
            yield places
        except BaseException:
            places.give_up()
            raise
        places.end()

    def reached(self, turn: int) -> None:
        """Advance the virtual time to a turn that was served to its end."""
        self._clock = max(self._clock, turn)

    def release(self, requests: _TenantRequests, completions: int) -> None:
        """Release a tenant's places and admit the requests whose turn has come."""
        self._taken -= completions
        requests.running -= completions
        while self._first_at_once and requests.waiting and not requests.running:
            self._serve_next(requests)
        while self._order and self._taken < self._places:
            _, _, requests = heapq.heappop(self._order)
            requests.is_queued = False
            if requests.waiting:  # otherwise all of its requests were cancelled, or served at once
                self._serve_next(requests)
                self._queue(requests)

    def _serve_next(self, requests: _TenantRequests) -> None:
        turn, completions = requests.waiting.popitem(last=False)
        self.waiting -= completions
        # A request cancelled in this iteration of the event loop has not left the queue yet.
        if not turn.cancelled():
            turn.set_result(self._serve(requests, completions))

    async def _wait(self, requests: _TenantRequests, completions: int) -> int:
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        requests.waiting[turn] = completions
        self.waiting += completions
        self._queue(requests)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came just before the cancellation: the places are taken
                self.release(requests, completions)
            elif requests.waiting.pop(turn, None) is not None:
                self.waiting -= completions
            raise

    def _queue(self, requests: _TenantRequests) -> None:
        if requests.waiting and not requests.is_queued:
            self._arrivals += 1
            requests.is_queued = True
            heapq.heappush(self._order, (requests.served, self._arrivals, requests))

    def _serve(self, requests: _TenantRequests, completions: int) -> int:
        """Take places; return the priority of the first of them."""
        is_first = self._first_at_once and not requests.running
        priority = requests.served - AT_ONCE if is_first else requests.served
        self._taken += completions
        requests.served += completions
        requests.running += completions
        return priority
