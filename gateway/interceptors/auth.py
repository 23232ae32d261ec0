"""Authenticate each call and check that its method is open to tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from structlog.contextvars import bind_contextvars

from gateway.access import ACCESS, Access
from gateway.authenticators import Authenticator
from paceline import errors
from paceline.rpc.identity import API_KEY_KEY, Identity, set_identity
from paceline.rpc.interceptors import AroundInterceptor, Call

_SCHEME = "bearer "


class AuthInterceptor(AroundInterceptor):
    """Sets the caller's identity, or ends the call with INVALID_API_KEY or METHOD_NOT_ALLOWED."""

    def __init__(self, authenticators: Sequence[Authenticator], access: Mapping[str, Access] = ACCESS) -> None:
        self._authenticators = authenticators
        self._access = access

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        identity = self._identify(call.metadata.get(API_KEY_KEY, ""))
        if self._access.get(call.method, Access.NOBODY) is not Access.TENANT:
            raise errors.MethodNotAllowed(f"{call.method} is not open to callers of the gateway")
        set_identity(identity)
        # Each call runs in its own context, so nothing needs to be unbound.
        bind_contextvars(tenant=identity.tenant, key=identity.key_name)
        yield

    def _identify(self, header: str) -> Identity:
        token = header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else ""
        for authenticator in self._authenticators:
            if identity := authenticator.identify(token):
                return identity
        problem = "is not known" if token else "is missing"
        raise errors.InvalidApiKey(f"the API key {problem}; send metadata `authorization: Bearer <key>`")
