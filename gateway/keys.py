"""The gateway's API keys: who holds one, until when, and when each was used last."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time

from gateway.reloaded_file import ReloadedFile
from paceline import errors
from paceline.files.api_keys import ApiKey, hash_token, in_rfc_3339, read_keys
from paceline.log import get_logger
from paceline.rpc.identity import Identity

_log = get_logger(__name__)

_WARN_BEFORE = timedelta(days=7)
"""How long before a key expires its use is warned of."""


class KeyRing:
    """The keys of a file, reloaded when the file changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises InvalidArgument when it cannot be read or has no key."""
        self._file = ReloadedFile(path, "keys file", read_keys)
        self._warned: set[ApiKey] = set()
        """Those that expire soon, once they were used: each is logged once."""
        self._last_use: dict[tuple[str, str], float] = {}
        if not self._file.content:
            raise errors.InvalidArgument("has no key; make one with `paceline keys add`", field="keys_file")

    def identify(self, token: str) -> Identity | None:
        """Return the identity of a key's holder, or None if unknown. Raises ApiKeyExpired."""
        if not token.strip():
            return None  # whatever the file holds
        digest, found = hash_token(token), None
        # No early exit, so that timing does not reveal which key nearly matched.
        for key in self._current():
            if hmac.compare_digest(digest, key.sha256):
                found = key
        if found is None:
            return None
        self._check_expiry(found)
        self._last_use[found.tenant, found.name] = time()
        return _identity(found)

    def still_admits(self, identity: Identity) -> bool:
        moment = datetime.now(UTC)
        return any(
            not key.has_expired(moment)
            and (key.tenant, key.name, _identity(key).credential)
            == (identity.tenant, identity.key_name, identity.credential)
            for key in self._current()
        )

    def last_use(self) -> Mapping[tuple[str, str], float]:
        """Return when keys in the file were used last, in Unix time, by tenant and name; those never used lack."""
        held = {(key.tenant, key.name) for key in self._file.content}
        return {key: used for key, used in list(self._last_use.items()) if key in held}

    def _check_expiry(self, key: ApiKey) -> None:
        """Log that a key expires soon. Raises ApiKeyExpired if it has."""
        moment = datetime.now(UTC)
        if key.expires is None or moment < key.expires - _WARN_BEFORE:
            return
        when = in_rfc_3339(key.expires)
        if key.has_expired(moment):
            message = f"the API key {key.name} expired at {when}; ask the operator for a new one"
            raise errors.ApiKeyExpired(message, metadata={"expired": when})
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("API key expires soon", key=key.name, tenant=key.tenant, expires=when)

    def _current(self) -> tuple[ApiKey, ...]:
        """Return the keys that the file has now."""
        if self._file.refresh():
            self._warned.intersection_update(self._file.content)
        return self._file.content


def _identity(key: ApiKey) -> Identity:
    return Identity(key.tenant, key.name, hash_token(f"credential of {key.sha256}")[:32])
