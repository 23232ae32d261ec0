"""What is admitted at a time, shared by tenant, and when those that find no room should come again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from paceline import errors
from paceline.types import Quota

_FIRST_SECONDS = 1.0
"""What a completion is taken to need before one has ended."""
_RETURNS = 1.5
"""Completions that are asked for again for each that ends: clients wait up to a half longer than they are told."""
_SOONEST, _LATEST = 0.1, 30.0
"""Bounds of the seconds that a client is told to wait."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the sampler until it ends."""

    completions: int
    tokens: int
    """Of the prompt, and the most that each completion may have."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much of one thing may be in flight."""

    limit: int
    """In all; 0 means any number."""
    tenant_limit: int = 0
    """Of one tenant; 0 means as much as in all."""
    setting: str = ""
    """Which setting is the tenant's limit."""


@dataclass(slots=True)
class _Tenant:
    in_flight: list[int] = field(default_factory=lambda: [0, 0])
    """Completions and tokens."""
    next_return: float = 0.0

    @property
    def is_active(self) -> bool:
        return self.in_flight[0] > 0


class Admission:
    """Counts completions and tokens from their admission to their end.

    A tenant alone may have all that is admitted. Of several each may have its share, whatever the others hold: one that
    came first and holds more gets nothing new before it is back at its share. So there may be more in flight than the
    limit for a while, by a half with two tenants and by the logarithm of their number with many. A tenant with nothing
    in flight always gets its request in, how large it may be, unless it is alone and the engine is full of what was
    left behind.

    Each client that is refused gets a later time to come again than the one of its tenant before it, about as far apart
    as completions end: refusing costs as much as answering a short call, and those who all come back every second would
    take the service's time from those it has admitted. All of it takes the same time for any number of tenants.
    """

    names: Sequence[str] = ("completions", "tokens")

    def __init__(self, completions: Room, tokens: Room, clock: Callable[[], float] = monotonic) -> None:
        """Take limits, of which that on completions is never 0."""
        self._rooms = (completions, tokens)
        self._clock = clock
        self._in_flight = [0, 0]
        self._tenants: dict[str, _Tenant] = {}
        self._active = 0
        self._seconds = _FIRST_SECONDS
        """From a completion's admission to its end, averaged over about as many as are admitted at a time."""

    @contextmanager
    def admit(self, tenant: str, demand: Demand, running: int) -> Iterator[None]:
        """Count a request from here to its end; `running` are the engine's completions, which may end later.

        Raises QuotaExceeded when the tenant would have more than it may, Overloaded when there is no room.
        """
        mine = self._tenants.setdefault(tenant, _Tenant())
        # One that is larger than all that is admitted takes all.
        amounts = [
            min(amount, room.limit or amount)
            for amount, room in zip((demand.completions, demand.tokens), self._rooms, strict=True)
        ]
        for index, amount in enumerate(amounts):
            self._check(index, mine, amount, running if index == 0 else 0)
        self._count(mine, amounts, 1)
        began = self._clock()
        try:
            yield
        finally:
            self._count(mine, amounts, -1)
            self._seconds += (self._clock() - began - self._seconds) * amounts[0] / self._rooms[0].limit

    def used(self, tenant: str) -> list[Quota]:
        """Return what a tenant has in flight."""
        mine = self._tenants.get(tenant, _Tenant())
        return [
            Quota(name, used, _smaller(room.limit, room.tenant_limit))
            for name, used, room in zip(self.names, mine.in_flight, self._rooms, strict=True)
        ]

    def tenants(self) -> list[str]:
        """Return those who have something in flight."""
        return [name for name, tenant in self._tenants.items() if tenant.is_active]

    def _check(self, index: int, mine: _Tenant, amount: int, running: int) -> None:
        room, name, used = self._rooms[index], self.names[index], mine.in_flight[index]
        if room.tenant_limit and used and used + amount > room.tenant_limit:
            raise errors.QuotaExceeded(
                f"{used} {name} of this tenant are in flight and this takes {amount}; at most {room.tenant_limit} may "
                f"be: send less at the same time, or have the operator raise {room.setting}",
                metadata={"quota": name, "used": str(used), "limit": str(room.tenant_limit)},
                retry_after=self._seconds_to_wait(mine, amount / room.tenant_limit),
            )
        busy = max(self._in_flight[index], running)
        if not room.limit or busy + amount <= room.limit:
            return
        sharing = self._active + (not mine.is_active)
        share = room.limit // sharing
        if sharing > 1 and (used == 0 or used + amount <= share):
            return
        message = f"{busy} {name} are waiting or running; at most {room.limit} may be"
        if sharing > 1:
            message += f", {share} of them each of {sharing} tenants', and {used} are this one's"
        raise errors.Overloaded(
            message,
            metadata={"quota": name, "used": str(used), "limit": str(share)},
            retry_after=self._seconds_to_wait(mine, amount / max(share, 1)),
        )

    def _count(self, mine: _Tenant, amounts: list[int], sign: int) -> None:
        self._active -= mine.is_active
        for index, amount in enumerate(amounts):
            mine.in_flight[index] += sign * amount
            self._in_flight[index] += sign * amount
        self._active += mine.is_active

    def _seconds_to_wait(self, mine: _Tenant, part: float) -> float:
        """Return when a request should come again that takes this part of what its tenant may have."""
        now = self._clock()
        mine.next_return = max(mine.next_return, now) + part * self._seconds / _RETURNS
        if mine.next_return > now + _LATEST:  # Callers at the longest delay must not all retry at once.
            mine.next_return = now + _LATEST
            return random.uniform(_LATEST / 2, _LATEST)  # noqa: S311 - guards no secret
        return max(mine.next_return - now, _SOONEST)


def _smaller(limit: int, other: int) -> int:
    """Return the smaller of two limits, of which 0 is none."""
    return min(limit or other, other or limit)
