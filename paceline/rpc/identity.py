"""Who calls, as the gateway tells the services, and the metadata that carries it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

CREDENTIAL_KEY = "x-paceline-credential"
TENANT_KEY = "x-paceline-tenant"
REQUEST_ID_KEY = "x-request-id"
API_KEY_KEY = "authorization"
ROUTE_KEY = "x-paceline-route"
"""Which version or checkpoint a sampling call names: by it the gateway picks a sampler without reading the body."""

DEFAULT_TENANT = "default"
"""The tenant of everybody where the gateway runs with --insecure."""

PEER_TENANT = ""
"""The tenant of a service that calls another for itself."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller."""

    tenant: str
    key_name: str = ""
    """Name of the API key; empty where there is none."""

    @property
    def is_peer(self) -> bool:
        """Whether a service calls for itself."""
        return self.tenant == PEER_TENANT


_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_tenant(name: object) -> bool:
    """Return whether `name` can name a tenant: 1 to 64 characters of [A-Za-z0-9._-], the first a letter or a digit.

    The empty name is that of services that call for themselves; no caller of the gateway may have it.
    """
    return isinstance(name, str) and _TENANT.fullmatch(name) is not None


_current: ContextVar[Identity] = ContextVar("paceline_identity")


def set_identity(identity: Identity) -> None:
    """Set the caller for the rest of this call."""
    _current.set(identity)


def current_identity() -> Identity:
    """Return the caller. Raises LookupError outside an authenticated call."""
    return _current.get()


def peer_metadata(credential: str, tenant: str = PEER_TENANT) -> Sequence[tuple[str, str]]:
    """Return the metadata by which one service calls another, for itself or for a tenant."""
    return ((CREDENTIAL_KEY, credential), (TENANT_KEY, tenant)) if credential else ((TENANT_KEY, tenant),)
