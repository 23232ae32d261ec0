"""Each tenant's usage and limits of the trainer's scarce resources."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.requests.tenant_limits import TenantLimits
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import Identity
from paceline.types import Quota
from trainer_service.limits import disk_guard
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.runs.registry import RunRegistry

RUNS = "runs"
"""Name of the quota on runs."""


class Quotas:
    """Reports quotas. They are enforced where usage is counted."""

    def __init__(
        self, max_runs: int, registry: RunRegistry, guard: DiskGuard, waiting: WaitingBytes, tenants: TenantLimits
    ) -> None:
        self._max_runs = max_runs
        self._tenants = tenants
        self._registry = registry
        self._guard = guard
        self._waiting = waiting

    def of(self, tenant: str) -> Sequence[Quota]:
        """Return a tenant's quotas."""
        return (
            Quota(
                RUNS,
                len(self._registry.owned_by(Identity(tenant))) if tenant else 0,
                self._tenants.of(tenant, RUNS, self._max_runs),
            ),
            Quota(disk_guard.QUOTA, self._guard.used(tenant), self._guard.limit_of(tenant)),
            Quota(self._waiting.quota.name, self._waiting.used(tenant), self._waiting.limit_of(tenant)),
        )

    def run_bytes(self, run_id: str) -> int:
        """Return the bytes that a run has on the volume."""
        return self._guard.run_bytes(run_id)

    def volume(self) -> tuple[int, int]:
        """Return the free bytes and the size of the volume."""
        return self._guard.volume()

    def tenants(self) -> list[str]:
        """Return the tenants that use anything; names may repeat."""
        return [*self._registry.tenants(), *self._guard.tenants(), *self._waiting.tenants()]
