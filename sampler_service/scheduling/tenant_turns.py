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
class _Line:
    """A tenant's requests that wait, in order of arrival, with their completions."""

    served: float = 0.0
    """What the tenant has had, in completions, on a clock that all tenants share."""
    waiting: OrderedDict[asyncio.Future[None], int] = field(default_factory=OrderedDict)
    is_queued: bool = False


class Turn:
    """The places of one request, which it gives back as its completions end."""

    def __init__(self, turns: Turns, completions: int) -> None:
        self._turns = turns
        self._completions = completions

    def ended(self, completions: int = 1) -> None:
        """Give places back, as many as it still has at most."""
        given = min(completions, self._completions)
        self._completions -= given
        self._turns.release(given)

    def end(self) -> None:
        """Give all places back."""
        self.ended(self._completions)


class Turns:
    """Start-time fair queueing over tenants (Goyal, Vin, Cheng 1996), with a completion as the unit of work.

    A request costs O(log tenants that wait).
    """

    def __init__(self, places: int) -> None:
        """Let requests in as long as fewer completions than `places` are in the engine."""
        self._places = places
        self._taken = 0
        self._clock = 0.0
        """What the tenant that was served last had had before."""
        self._lines: dict[str, _Line] = {}
        self._order: list[tuple[float, int, _Line]] = []
        """Lines with somebody in them, the one served least first; of two the one that came first."""
        self._arrivals = 0
        self.waiting = 0
        """Completions that wait."""

    @asynccontextmanager
    async def turn(self, tenant: str, completions: int) -> AsyncIterator[Turn]:
        """Wait for a turn, and hold its places until each completion, or the block, ends."""
        line = self._lines.setdefault(tenant, _Line())
        if not line.waiting:
            line.served = max(line.served, self._clock)
        if self._order or self._taken >= self._places:
            await self._wait(line, completions)
        else:
            self._serve(line, completions)
        turn = Turn(self, completions)
        try:
            yield turn
        finally:
            turn.end()

    def release(self, completions: int) -> None:
        """Give places back, and let in those whose turn has come."""
        self._taken -= completions
        while self._order and self._taken < self._places:
            _, _, line = heapq.heappop(self._order)
            line.is_queued = False
            if line.waiting:  # else all who waited have left
                place, following = line.waiting.popitem(last=False)
                self.waiting -= following
                # One that was cancelled in this turn of the loop has not left the line yet.
                if not place.cancelled():
                    self._serve(line, following)
                    place.set_result(None)
                self._queue(line)

    async def _wait(self, line: _Line, completions: int) -> None:
        place = asyncio.get_running_loop().create_future()
        line.waiting[place] = completions
        self.waiting += completions
        self._queue(line)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # its turn came in the same moment
                self.release(completions)
            elif line.waiting.pop(place, None) is not None:
                self.waiting -= completions
            raise

    def _queue(self, line: _Line) -> None:
        if line.waiting and not line.is_queued:
            self._arrivals += 1
            line.is_queued = True
            heapq.heappush(self._order, (line.served, self._arrivals, line))

    def _serve(self, line: _Line, completions: int) -> None:
        self._taken += completions
        self._clock = max(self._clock, line.served)
        line.served += completions
