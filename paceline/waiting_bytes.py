"""How many bytes of calls wait in a service's memory, by tenant and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline import errors

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BytesQuota:
    """What the bytes are, in refusals."""

    name: str
    """The quota's."""
    setting: str
    """Which setting is a tenant's limit."""


COMMANDS = BytesQuota("waiting_bytes", "max_waiting_bytes_per_tenant")
"""Commands in the trainer, from their arrival to their answer."""
CALLS = BytesQuota("call_bytes", "max_bytes_in_flight_per_tenant")
"""Calls that the gateway passes on."""


class WaitingBytes:
    """Counts messages from their arrival to their answer.

    Memory is two to three times as much: gRPC keeps the bytes of a call beside the message that was read from them.
    """

    def __init__(self, limit: int = 0, tenant_limit: int = 0, quota: BytesQuota = COMMANDS) -> None:
        """Take how many bytes may wait in all and of one tenant; 0 means any number."""
        self._limit = limit
        self.tenant_limit = tenant_limit
        self.quota = quota
        self._by_tenant: Counter[str] = Counter()
        self._total = 0

    def used(self, tenant: str) -> int:
        """Return how many of a tenant's bytes wait."""
        return self._by_tenant[tenant]

    def tenants(self) -> list[str]:
        """Return those of whom something waits."""
        return list(self._by_tenant)

    def check(self, tenant: str, size: int) -> None:
        """Raise QuotaExceeded or Overloaded, to be tried again soon, unless `size` bytes more may wait."""
        used = self._by_tenant[tenant]
        if self.tenant_limit and used + size > self.tenant_limit:
            raise errors.QuotaExceeded(
                f"{used} bytes of this tenant's calls wait and this has {size}; at most {self.tenant_limit} may: wait "
                f"for answers, or have the operator raise {self.quota.setting}",
                metadata={"quota": self.quota.name, "used": str(used), "limit": str(self.tenant_limit)},
                retry_after=_RETRY_SECONDS,
            )
        if self._limit and self._total + size > self._limit:
            message = f"{self._total} bytes of calls wait and this has {size}; at most {self._limit} may"
            raise errors.Overloaded(message, retry_after=_RETRY_SECONDS)

    def add(self, tenant: str, size: int) -> None:
        """Count bytes that wait."""
        self._by_tenant[tenant] += size
        self._total += size

    def remove(self, tenant: str, size: int) -> None:
        """Count bytes that wait no longer."""
        self._total -= size
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    @contextmanager
    def waiting(self, tenant: str, size: int) -> Iterator[None]:
        """Count bytes that wait while the block runs; a tenant's only call always may. Raises as `check` does."""
        if self._by_tenant[tenant]:
            self.check(tenant, size)
        self.add(tenant, size)
        try:
            yield
        finally:
            self.remove(tenant, size)
