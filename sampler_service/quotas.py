"""What each tenant has of what is scarce in the sampler, and how much it may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.types import Quota
from sampler_service.scheduling.admission import Admission
from sampler_service.stores.base import Versions

VERSIONS = "versions"
"""The quota's name."""


class Quotas:
    """Says them; those who count refuse what is too much."""

    def __init__(self, admission: Admission, versions: Versions, max_versions: int) -> None:
        """Take how many versions a tenant may have loaded when it is alone."""
        self._admission = admission
        self._versions = versions
        self._max_versions = max_versions

    def of(self, tenant: str) -> Sequence[Quota]:
        """Return a tenant's quotas."""
        return (*self._admission.used(tenant), Quota(VERSIONS, self._loaded()[tenant], self._max_versions))

    def tenants(self) -> list[str]:
        """Return those who have something."""
        return [*self._admission.tenants(), *self._loaded()]

    def _loaded(self) -> Counter[str]:
        return Counter(entry.tenant for entry in self._versions)
