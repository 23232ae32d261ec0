"""Services accept calls only from the gateway and from each other."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline import errors
from paceline.rpc.identity import (
    CREDENTIAL_KEY,
    DEFAULT_TENANT,
    PEER_TENANT,
    TENANT_KEY,
    Identity,
    is_tenant,
    set_identity,
)
from paceline.rpc.interceptors.around import AroundInterceptor, Call


class CredentialInterceptor(AroundInterceptor):
    """Admits callers with the shared credential and trusts the tenant that they name.

    Without a credential (a service that runs insecurely) every caller is admitted; one that names no tenant is the
    default tenant.
    """

    def __init__(self, credential: str) -> None:
        self._credential = credential.encode()

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        tenant = call.metadata(TENANT_KEY)
        if self._credential:
            given = (call.metadata(CREDENTIAL_KEY) or "").encode()
            if not hmac.compare_digest(given, self._credential) or tenant is None:
                raise errors.MissingCredential(
                    "this service answers only the gateway; call the gateway with an API key"
                )
        if tenant not in {None, PEER_TENANT} and not is_tenant(tenant):
            raise errors.MissingCredential("the metadata name no tenant; call the gateway with an API key")
        set_identity(Identity(DEFAULT_TENANT if tenant is None else tenant))
        yield
