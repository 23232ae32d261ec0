"""Ways to learn from what a caller shows who it is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from paceline import errors
from paceline.rpc.identity import DEFAULT_TENANT, Identity, is_tenant


class Authenticator(Protocol):
    """Knows callers by their token."""

    def identify(self, token: str) -> Identity | None:
        """Return whose token this is, or None if it is not known. An empty token means that the caller showed none."""
        ...


class Everybody:
    """Lets everybody in as the default tenant, for a gateway that runs with --insecure."""

    def identify(self, token: str) -> Identity | None:
        return Identity(DEFAULT_TENANT)


class JwtVerifier:
    """Knows callers by JSON Web Tokens (RFC 7519) signed with one key by one algorithm. They must expire (`exp`)."""

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
