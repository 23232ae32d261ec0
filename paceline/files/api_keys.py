"""API keys, in a JSON file that holds each key's name, tenant and SHA-256, but never the key itself."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from paceline import errors
from paceline.files.regular_files import NotRegularFile, read_file
from paceline.files.secret_files import lock, write_secret
from paceline.rpc.identity import is_tenant

PREFIX = "pl-"
"""Prefix of every key, so that scanners for leaked secrets recognise it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


_OF_NO_KEY = frozenset(map(hash_token, ("", " ", "\n", "\r\n", "\t", PREFIX, PREFIX + "\n")))
"""What `hash_token` and `sha256sum` make of an empty file or variable."""


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a keys file. Raises InvalidArgument that names the problem."""
    try:
        # The gateway reads the file between calls, so a pipe must not block it. Kubernetes' secrets are links.
        entries = json.loads(read_file(Path(os.path.realpath(path))))
        if not isinstance(entries, list):
            raise ValueError(f"it is a {type(entries).__name__}")
        keys = tuple(ApiKey(**entry) for entry in entries)
    except NotRegularFile as error:
        raise errors.InvalidArgument(f"{path} cannot be read: it is no regular file", field="keys_file") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"not a list of name, tenant, sha256: {error}"
        raise errors.InvalidArgument(f"{path} cannot be read: {problem}", field="keys_file") from error
    for key in keys:
        _check(key)
    if len({key.name for key in keys}) != len(keys):
        raise errors.InvalidArgument(f"{path} has two keys with the same name", field="keys_file")
    return keys


def update_keys(path: Path, change: Callable[[tuple[ApiKey, ...]], Iterable[ApiKey]], mode: int = 0o600) -> None:
    """Replace the keys in a file by what `change` makes of them; processes that do so at the same time take turns.

    A file that does not exist has no keys, and is made with `mode`; one that stays the same is not written. Raises
    InvalidArgument if the file cannot be locked, read or written, and what `change` raises.
    """
    try:
        with lock(path):
            before = read_keys(path) if path.exists() else None
            after = tuple(change(before or ()))
            for key in after:
                _check(key)
            if after != before:
                write_secret(path, (json.dumps([asdict(key) for key in after], indent=2) + "\n").encode(), mode)
    except FileNotFoundError as error:
        message = f"{path.parent} does not exist; make this folder, or name a file in another"
        raise errors.InvalidArgument(message, field="keys_file") from error
    except OSError as error:
        raise errors.InvalidArgument(
            f"{error.filename} cannot be written: {error.strerror}; run this as the user who owns {path}, "
            "and see that its disk has free space",
            field="keys_file",
        ) from error


def _check(key: ApiKey) -> None:
    for field, value in (("tenant", key.tenant), ("name", key.name)):
        if not is_tenant(value):
            raise errors.InvalidArgument("must be 1 to 64 characters of [A-Za-z0-9._-]", field=field)
    if not isinstance(key.sha256, str) or not _SHA256.fullmatch(key.sha256):
        raise errors.InvalidArgument(f"of key {key.name} is not 64 lower-case hex digits", field="sha256")
    if key.sha256 in _OF_NO_KEY:
        raise errors.InvalidArgument(
            f"of key {key.name} is that of an empty key; remove the entry, and make a key with "
            "`python -m paceline.services gateway.keys add`",
            field="sha256",
        )
