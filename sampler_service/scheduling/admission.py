"""Limits what is in flight, shared fairly by tenants, and tells refused clients when to retry."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from paceline import errors
from paceline.requests.tenant_limits import TenantLimits
from paceline.types import Quota

_FIRST_SECONDS = 1.0
"""Assumed duration of a completion until one has ended."""
_RETURNS = 1.5
"""Retried completions scheduled for each one that ends: clients wait up to half again as long as they are told."""
_SOONEST, _LATEST = 0.1, 30.0
"""Bounds of the retry delay, in seconds."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request uses of the sampler until it ends."""

    completions: int
    tokens: int
    """Tokens of the prompt, plus the most that all completions together may have."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """How much of one resource may be in flight."""

    limit: int
    """Limit in total; 0 means no limit."""
    tenant_limit: int = 0
    """Limit per tenant; 0 means only the total limit applies."""


@dataclass(slots=True)
class _Tenant:
    in_flight: list[int] = field(default_factory=lambda: [0, 0])
    """Completions and tokens, in this order."""
    next_return: float = 0.0

    @property
    def is_active(self) -> bool:
        return self.in_flight[0] > 0


class Admission:
    """Counts completions and tokens from their admission to their end.

    A single tenant may use the whole limit. Among several, each may have its share, whatever the others hold: a tenant
    that came first and holds more gets nothing new until it is back within its share. More than the limit may therefore
    be in flight for a while: half as much again with two tenants, growing with the logarithm of their number. A tenant
    with nothing in flight is always admitted, however large its request, unless it is the only one and the engine is
    still full of completions that were left behind.

    Each refused client of a tenant is told to retry later than the one refused before it, spaced about as completions
    end. A refusal costs as much as answering a short call, and clients that all retried every second would take the
    service's time from admitted requests. The cost is independent of the number of tenants.
    """

    names: Sequence[str] = ("completions", "tokens")

    def __init__(
        self,
        completions: ResourceLimits,
        tokens: ResourceLimits,
        clock: Callable[[], float] = monotonic,
        tenants: TenantLimits | None = None,
    ) -> None:
        """Set the limits; that on completions must not be 0. `tenants` may have limits of their own."""
        self._of_tenants = TenantLimits() if tenants is None else tenants
        self._limits = (completions, tokens)
        self._clock = clock
        self._in_flight = [0, 0]
        self._tenants: dict[str, _Tenant] = {}
        self._active = 0
        self._seconds = _FIRST_SECONDS
        """Mean time from a completion's admission to its end, averaged over about as many as are admitted at a time."""

    @contextmanager
    def admit(self, tenant: str, usage: Usage, running: int) -> Iterator[None]:
        """Count a request while the block runs.

        `running` is the number of completions in the engine, which may outlast their requests. Raises QuotaExceeded if
        the tenant would exceed its own limit, Overloaded if the sampler is full.
        """
        mine = self._tenants.setdefault(tenant, _Tenant())
        # A request larger than the limit counts as the whole limit.
        amounts = [
            min(amount, limits.limit or amount)
            for amount, limits in zip((usage.completions, usage.tokens), self._limits, strict=True)
        ]
        for index, amount in enumerate(amounts):
            self._check(index, tenant, amount, running if index == 0 else 0)
        self._count(mine, amounts, 1)
        began = self._clock()
        try:
            yield
        finally:
            self._count(mine, amounts, -1)
            self._seconds += (self._clock() - began - self._seconds) * amounts[0] / self._limits[0].limit

    def used(self, tenant: str) -> list[Quota]:
        """Return what a tenant has in flight, and its limits."""
        mine = self._tenants.get(tenant, _Tenant())
        return [
            Quota(name, used, _smaller(limits.limit, self._of_tenants.of(tenant, name, limits.tenant_limit)))
            for name, used, limits in zip(self.names, mine.in_flight, self._limits, strict=True)
        ]

    def tenants(self) -> list[str]:
        """Return the tenants that have something in flight."""
        return [name for name, tenant in self._tenants.items() if tenant.is_active]

    def _check(self, index: int, tenant: str, amount: int, running: int) -> None:
        mine = self._tenants[tenant]
        limits, name, used = self._limits[index], self.names[index], mine.in_flight[index]
        own = self._of_tenants.of(tenant, name, limits.tenant_limit)
        if own and used and used + amount > own:
            raise errors.QuotaExceeded(
                f"{used} {name} of this tenant are in flight and this takes {amount}; at most {own} may be: send less "
                f"at the same time, or have the operator raise {self._of_tenants.raised_by(tenant, name)}",
                metadata={"quota": name, "used": str(used), "limit": str(own)},
                retry_after=self._seconds_to_wait(mine, amount / own),
            )
        busy = max(self._in_flight[index], running)
        if not limits.limit or busy + amount <= limits.limit:
            return
        # The limit is reached. Each active tenant still gets its share, which others that came first may have taken.
        sharing = self._active + (not mine.is_active)
        share = limits.limit // sharing
        if sharing > 1 and (used == 0 or used + amount <= share):
            return
        message = f"{busy} {name} are waiting or running; at most {limits.limit} may be"
        if sharing > 1:
            message += f", {share} for each of {sharing} tenants; {used} are this one's"
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
        """Return the retry delay of a refused request that needs this part of its tenant's share."""
        now = self._clock()
        mine.next_return = max(mine.next_return, now) + part * self._seconds / _RETURNS
        if mine.next_return > now + _LATEST:  # jitter: clients at the longest delay must not all retry at once
            mine.next_return = now + _LATEST
            return random.uniform(_LATEST / 2, _LATEST)  # noqa: S311 - guards no secret
        return max(mine.next_return - now, _SOONEST)


def _smaller(limit: int, other: int) -> int:
    """Return the smaller of two limits; 0 means no limit."""
    return min(limit or other, other or limit)
