"""The gateway's tenants file: the limits of tenants that differ from the services' settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.files.json_files import read_json, update_json
from paceline.requests.tenant_limits import Limits, check_limits
from paceline.rpc.identity import is_tenant

FIELD = "tenants_file"


def read_tenants(path: Path) -> Mapping[str, Limits]:
    """Return the limits by tenant; a file that does not exist has none. Raises InvalidArgument naming the problem."""
    if not path.exists():
        return {}
    return read_json(path, FIELD, "an object of limits by tenant, such as {'team-a': {'runs': 8}}", _parse)


def change_limits(path: Path, tenant: str, limits: Limits, removed: frozenset[str] = frozenset()) -> Limits:
    """Set and remove limits of a tenant; return those that it then has of its own.

    Raises InvalidArgument for a name that no tenant or quota has, or if the file cannot be locked, read or written.
    """
    check_limits({**limits, **dict.fromkeys(removed, 0)})
    if not is_tenant(tenant):
        raise errors.InvalidArgument("must be 1 to 64 characters of [A-Za-z0-9._-]", field="tenant")
    own: Limits = {}

    def change(before: Mapping[str, Limits] | None) -> Mapping[str, Limits]:
        nonlocal own
        others = {name: each for name, each in (before or {}).items() if name != tenant}
        given = {**(before or {}).get(tenant, {}), **limits}
        own = {name: limit for name, limit in given.items() if name not in removed}
        return {**others, tenant: own} if own else others

    update_json(path, FIELD, read_tenants, change, dict)
    return own


def _parse(entries: Any) -> Mapping[str, Limits]:
    if not isinstance(entries, dict):
        raise ValueError(f"it is a {type(entries).__name__}")
    for tenant, limits in entries.items():
        if not is_tenant(tenant):
            raise ValueError(f"{tenant[:64]!r} is no tenant's name")
        try:
            check_limits(limits)
        except errors.InvalidArgument as error:
            raise ValueError(f"of {tenant}, {error}") from error
    return entries
