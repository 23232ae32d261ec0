"""The places for adapters in the engine: how many are taken, and which version goes for whose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline import errors
from paceline.requests.tenant_limits import TenantLimits
from paceline.rpc.identity import PEER_TENANT
from sampler_service.stores.version import FINDABLE, IN_ENGINE, UNLOADING, Version, VersionState, VersionTable

_RETRY_SECONDS = 1.0
"""Retry delay for a caller that found all versions in use."""


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Limits on loaded versions, and the timeout of fetches."""

    max_loaded: int
    """Most versions in the engine."""
    keep_per_run: int
    """Newest versions of each run that stay loaded even if no request uses them."""
    fetch_timeout_seconds: float
    max_per_tenant: int = 0
    """Most versions of one tenant in the engine, even if it is the only tenant; 0 means `max_loaded`."""
    tenants: TenantLimits = field(default_factory=TenantLimits)
    """Tenants that have such a limit of their own."""

    def of_tenant(self, tenant: str) -> int:
        """Return the most versions of a tenant in the engine; 0 means `max_loaded`."""
        return self.tenants.of(tenant, "versions", self.max_per_tenant)


class Places:
    """Decides which idle version goes when the engine is full, or when a tenant has reached its own limit.

    It is the least recently used one of the tenant that needs a place or, if that tenant is below its share, one of a
    tenant above its share.
    """

    def __init__(self, table: VersionTable, limits: RegistryLimits) -> None:
        self._table = table
        self._limits = limits

    def are_full(self) -> bool:
        """Return whether every place in the engine is taken; one that is being unloaded takes its place until then."""
        return len(self._table.of(IN_ENGINE)) >= self._limits.max_loaded

    def are_clearing(self) -> bool:
        """Return whether a place becomes free without an eviction."""
        return bool(self._table.of(UNLOADING))

    def is_at_limit(self, tenant: str) -> bool:
        """Return whether a tenant has reached its own limit, which applies even if it is the only tenant."""
        limit = self._limits.of_tenant(tenant)
        return bool(limit) and self._counts()[tenant] >= limit

    def superfluous(self, tenant: str) -> Version | None:
        """Return the version to evict for one of this tenant. Tenants within their share lose none to other tenants."""
        counts = self._counts()
        share = self._share(counts, tenant)
        idle = [version for version in self._table.of({VersionState.ACTIVE}) if not version.requests_in_flight]
        mine = next((version for version in idle if version.tenant == tenant), None)
        if counts[tenant] >= share or self.is_at_limit(tenant):
            return mine
        return next((version for version in idle if counts[version.tenant] > share), mine)

    def check(self, tenant: str) -> None:
        """Refuse a version that could not be loaded, before it is fetched. Raises QuotaExceeded, Overloaded."""
        if not self.are_full() or self.are_clearing():
            return
        if tenant == PEER_TENANT:  # the owner is known only from the manifest, once it is fetched
            is_hopeless = all(version.requests_in_flight for version in self._table.findable())
        else:
            is_hopeless = self.superfluous(tenant) is None
        if is_hopeless:
            raise self.none_for(tenant)

    def none_for(self, tenant: str) -> errors.Exhausted:
        """Return the error for a tenant that finds no place."""
        counts = self._counts()
        used, share = counts[tenant], self._share(counts, tenant)
        if self.is_at_limit(tenant):
            return errors.QuotaExceeded(
                f"all {used} versions that this tenant may have loaded are in use: wait for their requests to end, or "
                f"have the operator raise {self._limits.tenants.raised_by(tenant, 'versions')}",
                metadata={"quota": "versions", "used": str(used), "limit": str(self._limits.of_tenant(tenant))},
                retry_after=_RETRY_SECONDS,
            )
        message = f"all {self._limits.max_loaded} versions that fit are in use; try again"
        if share <= used < self._limits.max_loaded:
            message = f"all {used} versions of this tenant are in use, and {share} are its share; try again"
        return errors.Overloaded(message, retry_after=_RETRY_SECONDS)

    def _counts(self) -> Counter[str]:
        return Counter(version.tenant for version in self._table.of(FINDABLE | {VersionState.VERIFYING}))

    def _share(self, counts: Counter[str], tenant: str) -> int:
        """Return the number of versions that a tenant may have, whatever other tenants hold."""
        return max(1, self._limits.max_loaded // len({*counts, tenant}))
