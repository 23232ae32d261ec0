"""API keys as stored in a keys file: a name, a tenant and the key's SHA-256, never the key itself."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256

PREFIX = "pl-"
"""Prefix of every key, so that scanners for leaked secrets recognise it."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry of the gateway's keys file."""

    name: str
    """Unique in the file; appears in logs."""
    tenant: str
    """Tenant whose runs the key's holder sees."""
    sha256: str
    """SHA-256 of the key, lower-case hex."""


def new_token() -> str:
    """Generate a key, as its holder sends it."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the SHA-256 under which a key is stored, lower-case hex."""
    return sha256(token.encode()).hexdigest()


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Parse the text of a keys file. Raises ValueError or TypeError if it is malformed."""
    return tuple(ApiKey(**entry) for entry in json.loads(text))


def dump_keys(keys: Iterable[ApiKey]) -> str:
    """Return the text of a keys file."""
    return json.dumps([asdict(key) for key in keys], indent=2) + "\n"
