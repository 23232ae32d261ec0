"""The caller's identity, and the metadata that carries it from the gateway to the services."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

CREDENTIAL_KEY = "x-paceline-credential"
TENANT_KEY = "x-paceline-tenant"
LIMITS_KEY = "x-paceline-limits"
"""The tenant's limits that differ from the settings, as the gateway's tenants file has them."""
REQUEST_ID_KEY = "x-request-id"
API_KEY_KEY = "authorization"
ROUTE_KEY = "x-paceline-route"
"""The version or checkpoint that a sampling call names, so the gateway picks a sampler without reading the body."""

DEFAULT_TENANT = "default"
"""The tenant of every caller if the gateway runs with --insecure."""

PEER_TENANT = ""
"""The tenant of a service that calls another on its own behalf."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller."""

    tenant: str
    key_name: str = ""
    """Name of the API key; empty if there is none."""
    credential: str = field(default="", repr=False, compare=False)
    """Tells the caller's credential from others, also from one that takes over its name; it does not disclose it."""

    @property
    def is_peer(self) -> bool:
        """Whether the caller is a service that calls on its own behalf."""
        return self.tenant == PEER_TENANT


_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_tenant(name: object) -> bool:
    """Return whether `name` is a valid tenant: 1 to 64 characters of [A-Za-z0-9._-], the first a letter or a digit.

    The empty name is reserved for services that call on their own behalf; no caller of the gateway may have it.
    """
    return isinstance(name, str) and _TENANT.fullmatch(name) is not None


_current: ContextVar[Identity] = ContextVar("paceline_identity")

set_identity = _current.set
"""Set the caller's identity for the rest of this call."""

current_identity = _current.get
"""Return the caller's identity. Raises LookupError outside an authenticated call."""


def peer_metadata(credential: str, tenant: str = PEER_TENANT) -> Sequence[tuple[str, str]]:
    """Return the metadata for a call to another service, on the caller's own behalf or for a tenant."""
    return ((CREDENTIAL_KEY, credential), (TENANT_KEY, tenant)) if credential else ((TENANT_KEY, tenant),)
