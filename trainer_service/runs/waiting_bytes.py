"""How many bytes of commands wait in memory, by tenant and in all."""

from __future__ import annotations

from collections import Counter

from paceline import errors

QUOTA = "waiting_bytes"
"""The quota's name."""

_RETRY_SECONDS = 1.0


class WaitingBytes:
    """Counts the messages of commands from their arrival to their answer.

    Memory is about twice as much: gRPC keeps the bytes of a call beside the message that was read from them.
    """

    def __init__(self, limit: int = 0, tenant_limit: int = 0) -> None:
        """Take how many bytes may wait in all and of one tenant; 0 means any number."""
        self._limit = limit
        self.tenant_limit = tenant_limit
        self._by_tenant: Counter[str] = Counter()
        self._total = 0

    def used(self, tenant: str) -> int:
        """Return how many bytes of a tenant's commands wait."""
        return self._by_tenant[tenant]

    def tenants(self) -> list[str]:
        """Return those of whom something waits."""
        return list(self._by_tenant)

    def check(self, tenant: str, size: int) -> None:
        """Raise QuotaExceeded or Overloaded, to be tried again soon, unless `size` bytes more may wait."""
        used = self._by_tenant[tenant]
        if self.tenant_limit and used + size > self.tenant_limit:
            raise errors.QuotaExceeded(
                f"{used} bytes of this tenant's commands wait and this has {size}; at most {self.tenant_limit} may: "
                f"wait for answers, or have the operator raise max_waiting_bytes_per_tenant",
                metadata={"quota": QUOTA, "used": str(used), "limit": str(self.tenant_limit)},
                retry_after=_RETRY_SECONDS,
            )
        if self._limit and self._total + size > self._limit:
            message = f"{self._total} bytes of commands wait and this has {size}; at most {self._limit} may"
            raise errors.Overloaded(message, retry_after=_RETRY_SECONDS)

    def add(self, tenant: str, size: int) -> None:
        """Count a command that waits."""
        self._by_tenant[tenant] += size
        self._total += size

    def remove(self, tenant: str, size: int) -> None:
        """Count one that waits no longer."""
        self._total -= size
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
