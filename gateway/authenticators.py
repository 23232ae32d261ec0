"""Authenticators: map a caller's token to its identity."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from paceline import errors
from paceline.rpc.identity import DEFAULT_TENANT, Identity, is_tenant


class Authenticator(Protocol):
    """Identifies callers by their token."""

    def identify(self, token: str) -> Identity | None:
        """Return the identity of a token's holder, or None if unknown. The token is empty if the caller sent none."""
        ...


class Everybody:
    """Admits every caller as the default tenant, for a gateway that runs with --insecure."""

    def identify(self, token: str) -> Identity | None:
        return Identity(DEFAULT_TENANT)


class JwtVerifier:
    """Identifies callers by JSON Web Tokens (RFC 7519), signed with one key and algorithm. They must expire (`exp`)."""

    def __init__(self, public_key_file: Path, algorithm: str, tenant_claim: str, audience: str = "") -> None:
        try:
            import jwt  # noqa: PLC0415
        except ImportError as error:
            message = "needs PyJWT; install paceline[jwt]"
            raise errors.InvalidArgument(message, field="jwt_public_key_file") from error
        self._jwt = jwt
        self._public_key = public_key_file.read_text()
        self._algorithm = algorithm
        self._tenant_claim = tenant_claim
        self._audience = audience or None

    def identify(self, token: str) -> Identity | None:
        try:
            claims = self._jwt.decode(
                token,
                self._public_key,
                algorithms=[self._algorithm],
                audience=self._audience,
                options={"require": ["exp", self._tenant_claim]},
            )
        except self._jwt.InvalidTokenError:
            return None
        tenant = claims[self._tenant_claim]
        return Identity(tenant, str(claims.get("sub", "jwt"))) if is_tenant(tenant) else None
