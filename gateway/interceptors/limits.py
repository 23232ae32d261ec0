"""Limit the calls in flight. Further calls wait in FIFO order within a tenant, and tenants take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline import errors
from paceline.rpc.identity import current_identity
from paceline.rpc.interceptors import AroundInterceptor, Call


class FairQueue:
    """Limits the calls in flight, in total and per tenant, with a bounded queue per tenant."""

    def __init__(self, max_in_flight: int, max_in_flight_per_tenant: int, max_queued_per_tenant: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_per_tenant = max_in_flight_per_tenant
        self._max_queued = max_queued_per_tenant
        self._in_flight = 0
        self._by_tenant: Counter[str] = Counter()
        # Tenants in order of their turns, the most recently served last; each queue in order of arrival.
        self._waiting: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

    async def acquire(self, tenant: str) -> None:
        """Wait for a place. Raises Overloaded at once when the tenant's queue is full."""
        if tenant not in self._waiting and self._has_place(tenant):
            self._take(tenant)
            return
        waiting = len(self._waiting.get(tenant, ()))
        if waiting >= self._max_queued:
            raise errors.Overloaded(f"{waiting} calls of this tenant wait already; send fewer at the same time")
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, OrderedDict())[place] = None
        try:
            await place
        except asyncio.CancelledError:
            self._give_up(tenant, place)
            raise

    def release(self, tenant: str) -> None:
        """Release a place."""
        self._in_flight -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        while (following := next(filter(self._has_place, self._waiting), None)) is not None:
            self._admit_one(following)

    def _has_place(self, tenant: str) -> bool:
        return self._in_flight < self._max_in_flight and self._by_tenant[tenant] < self._max_per_tenant

    def _take(self, tenant: str) -> None:
        self._in_flight += 1
        self._by_tenant[tenant] += 1

    def _admit_one(self, tenant: str) -> None:
        queue = self._waiting.pop(tenant)
        place, _ = queue.popitem(last=False)
        if queue:
            self._waiting[tenant] = queue
        # A call cancelled in this iteration of the event loop is still in the queue.
        if not place.cancelled():
            self._take(tenant)
            place.set_result(None)

    def _give_up(self, tenant: str, place: asyncio.Future[None]) -> None:
        if not place.cancelled():
            self.release(tenant)
            return
        if queue := self._waiting.get(tenant):
            queue.pop(place, None)
        if not queue:
            self._waiting.pop(tenant, None)


class LimitsInterceptor(AroundInterceptor):
    """Admits a call when a place is free."""

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        tenant = current_identity().tenant
        await self._queue.acquire(tenant)
        try:
            yield
        finally:
            self._queue.release(tenant)
