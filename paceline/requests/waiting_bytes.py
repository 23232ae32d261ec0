"""Limits on the bytes of unanswered calls in a service's memory, per tenant and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline import errors
from paceline.requests.tenant_limits import TenantLimits

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BytesQuota:
    """How refusals name what the bytes count against."""

    name: str
    """Name of the quota."""


COMMANDS = BytesQuota("waiting_bytes")
"""Commands in the trainer, from arrival to answer."""
CALLS = BytesQuota("call_bytes")
"""Calls that the gateway forwards, and large answers that are not read."""


class WaitingBytes:
    """Counts the bytes of messages from arrival to answer.

    Memory use is three to four times as high: gRPC keeps the bytes of a call beside the message parsed from them, and
    the trainer the arrays decoded from that.
    """

    def __init__(
        self,
        limit: int = 0,
        tenant_limit: int = 0,
        quota: BytesQuota = COMMANDS,
        tenants: TenantLimits | None = None,
    ) -> None:
        """Set the limits in bytes, in total and per tenant; 0 means none. `tenants` may have limits of their own."""
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._tenants = TenantLimits() if tenants is None else tenants
        self.quota = quota
        self._by_tenant: Counter[str] = Counter()
        self._total = 0

    def limit_of(self, tenant: str) -> int:
        """Return the most bytes of a tenant that may wait; 0 means no limit."""
        return self._tenants.of(tenant, self.quota.name, self._tenant_limit)

    def raised_by(self, tenant: str) -> str:
        """Name what an operator raises to raise a tenant's limit."""
        return self._tenants.raised_by(tenant, self.quota.name)

    def used(self, tenant: str) -> int:
        """Return the number of a tenant's waiting bytes."""
        return self._by_tenant[tenant]

    def tenants(self) -> list[str]:
        """Return the tenants that have waiting bytes."""
        return list(self._by_tenant)

    def check(self, tenant: str, size: int) -> None:
        """Raise QuotaExceeded or Overloaded, both with `retry_after`, unless `size` more bytes may wait."""
        used, limit = self._by_tenant[tenant], self.limit_of(tenant)
        if limit and used + size > limit:
            raise errors.QuotaExceeded(
                f"{used} bytes of this tenant's calls wait and this has {size}; at most {limit} may: read "
                f"the answers, or have the operator raise {self.raised_by(tenant)}",
                metadata={"quota": self.quota.name, "used": str(used), "limit": str(limit)},
                retry_after=_RETRY_SECONDS,
            )
        if self._limit and self._total + size > self._limit:
            message = f"{self._total} bytes of calls wait and this has {size}; at most {self._limit} may"
            raise errors.Overloaded(message, retry_after=_RETRY_SECONDS)

    def add(self, tenant: str, size: int) -> None:
        """Add bytes that wait."""
        self._by_tenant[tenant] += size
        self._total += size

    def remove(self, tenant: str, size: int) -> None:
        """Remove bytes that no longer wait."""
        self._total -= size
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    @contextmanager
    def waiting(self, tenant: str, size: int) -> Iterator[None]:
        """Count bytes while the block runs; a tenant's only call is always admitted. Raises as `check` does."""
        if self._by_tenant[tenant]:
            self.check(tenant, size)
        self.add(tenant, size)
        try:
            yield
        finally:
            self.remove(tenant, size)
