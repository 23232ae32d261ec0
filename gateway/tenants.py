"""The limits of tenants, from the gateway's tenants file, which the gateway passes on to the services."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.reloaded_file import ReloadedFile
from paceline.files.tenants_file import read_tenants
from paceline.requests.tenant_limits import TenantLimits, as_text
from paceline.rpc.identity import LIMITS_KEY, peer_metadata


class Tenants:
    """The tenants of a file, reloaded when the file changes, and the metadata of calls on their behalf."""

    def __init__(self, path: Path | None = None, credential: str = "") -> None:
        """`credential` authenticates the gateway to the services; empty if they run insecurely.

        Without `path`, or a file there, no tenant has limits of its own. Raises InvalidArgument naming the problem.
        """
        self.limits = TenantLimits()
        self._credential = credential
        self._file = None if path is None else ReloadedFile(path, "tenants file", read_tenants)
        if self._file is not None:
            self.limits.replace(self._file.content)

    def metadata(self, tenant: str) -> Sequence[tuple[str, str]]:
        """Return the metadata of a call to a service for a tenant: who calls, and the tenant's own limits.

        They are sent without a file too, so that services forget those of a file that was taken away.
        """
        if self._file is not None and self._file.refresh():
            self.limits.replace(self._file.content)
        return *peer_metadata(self._credential, tenant), (LIMITS_KEY, as_text(self.limits.own(tenant)))
