"""API keys as files hold them: a name, a tenant and the key's SHA-256, never the key."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256

PREFIX = "pl-"
"""What every key starts with, so that scanners for leaked secrets know one."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the gateway's keys file holds it."""

    name: str
    """Unique in the file; appears in logs."""
    tenant: str
    """Whose runs its holder sees."""
    sha256: str
    """SHA-256 of the key, lower-case hex."""


def new_token() -> str:
    """Make a key: what its holder sends."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the SHA-256 that stands for a key, lower-case hex."""
    return sha256(token.encode()).hexdigest()


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Read the text of a keys file. Raises ValueError or TypeError for another."""
    return tuple(ApiKey(**entry) for entry in json.loads(text))


def dump_keys(keys: Iterable[ApiKey]) -> str:
    """Write the text of a keys file."""
    return json.dumps([asdict(key) for key in keys], indent=2) + "\n"
