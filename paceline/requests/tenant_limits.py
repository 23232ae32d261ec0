"""Limits of single tenants that differ from the services' settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from paceline import errors

Limits = Mapping[str, int]
"""Limits by the name of the quota; 0 means no limit of the tenant's own."""

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "calls": "max_in_flight_per_tenant",
        "call_bytes": "max_bytes_in_flight_per_tenant",
        "runs": "max_runs_per_tenant",
        "volume_bytes": "max_volume_bytes_per_tenant",
        "waiting_bytes": "max_waiting_bytes_per_tenant",
        "completions": "max_completions_per_tenant",
        "tokens": "max_tokens_per_tenant",
        "versions": "max_versions_per_tenant",
    }
)
"""The quotas that a tenant can have a limit of its own for, and the setting that holds for all others."""

MAX_LIMIT = (1 << 63) - 1
_WRITTEN = re.compile(r"([a-z_]{1,32})=([0-9]{1,19})")


class TenantLimits:
    """Answers what limit holds for a tenant: its own or, without one, that of the settings."""

    def __init__(self) -> None:
        self._limits: Mapping[str, Limits] = {}

    def replace(self, limits: Mapping[str, Limits]) -> None:
        """Set the limits of all tenants."""
        self._limits = limits

    def own(self, tenant: str) -> Limits:
        """Return the limits that a tenant has of its own."""
        return self._limits.get(tenant, {})

    def of(self, tenant: str, quota: str, setting: int) -> int:
        """Return the limit that holds for a tenant; 0 means none."""
        return self.own(tenant).get(quota, setting)

    def raised_by(self, tenant: str, quota: str) -> str:
        """Name what an operator raises to raise the limit that holds for a tenant."""
        if quota in self.own(tenant):
            return f"this tenant's limit `{quota}` (`paceline keys quota`)"
        return SETTINGS[quota]


class HeardLimits(TenantLimits):
    """What the gateway said in the last call of each tenant."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: dict[str, Limits] = {}
        self._texts: dict[str, str] = {}
        self.replace(self._heard)

    def hear(self, tenant: str, text: str) -> None:
        """Take the limits of a tenant from a call's metadata; an empty text means that it has none of its own."""
        if self._texts.get(tenant, "") == text:
            return
        if text:
            self._texts[tenant], self._heard[tenant] = text, from_text(text)
        else:
            del self._texts[tenant], self._heard[tenant]


def as_text(limits: Limits) -> str:
    """Write limits as metadata have them: runs=8,tokens=1000."""
    return ",".join(f"{name}={limit}" for name, limit in limits.items())


def from_text(text: str) -> Limits:
    """Read what `as_text` wrote; what this version does not know is left out, as another version may have sent it."""
    found = (_WRITTEN.fullmatch(part) for part in text.split(","))
    return {one[1]: min(int(one[2]), MAX_LIMIT) for one in found if one is not None and one[1] in SETTINGS}


def check_limits(limits: object) -> Limits:
    """Return limits as files have them. Raises InvalidArgument that names the quota."""
    if not isinstance(limits, dict):
        raise errors.InvalidArgument("is not an object of limits by quota", field="limits")
    for name, limit in limits.items():
        if name not in SETTINGS:
            raise errors.InvalidArgument(f"is no quota; there are {', '.join(SETTINGS)}", field=str(name)[:64])
        if not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= MAX_LIMIT:
            raise errors.InvalidArgument(f"must be an integer from 0, which means no limit, to {MAX_LIMIT}", field=name)
    return limits
