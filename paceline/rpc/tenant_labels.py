"""Labels of metrics by tenant that last as long as the process."""

from __future__ import annotations

OTHERS = "other tenants"
"""Label of the tenants beyond the limit. No tenant has this name, because of the space."""
_MOST = 100


class TenantLabels:
    """Gives each of the first tenants its own label, and all later ones one: tokens may name any number of tenants."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._named: set[str] = set()

    def of(self, tenant: str) -> str:
        """Return a tenant's label."""
        if tenant not in self._named:
            if len(self._named) >= self._most:
                return OTHERS
            self._named.add(tenant)
        return tenant
