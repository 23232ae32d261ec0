"""Each tenant's usage and limits of the sampler's scarce resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.types import Quota
from sampler_service.scheduling.admission import Admission
from sampler_service.stores.base import Versions

VERSIONS = "versions"
"""Name of the quota on loaded versions."""


class Quotas:
    """Reports quotas. They are enforced where usage is counted."""

    def __init__(self, admission: Admission, versions: Versions, max_versions: int) -> None:
        """`max_versions` is the number of versions that a tenant may have loaded if it is the only one."""
        self._admission = admission
        self._versions = versions
        self._max_versions = max_versions

    def of(self, tenant: str) -> Sequence[Quota]:
        """Return a tenant's quotas."""
        return (*self._admission.used(tenant), Quota(VERSIONS, self._loaded()[tenant], self._max_versions))

    def tenants(self) -> list[str]:
        """Return the tenants that use anything; names may repeat."""
        return [*self._admission.tenants(), *self._loaded()]

    def _loaded(self) -> Counter[str]:
        return Counter(entry.tenant for entry in self._versions)
