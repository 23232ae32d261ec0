"""API keys, in a JSON file that holds each key's name, tenant, SHA-256 and dates, but never the key itself."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.files.json_files import read_json, update_json
from paceline.rpc.identity import is_tenant

PREFIX = "pl-"
"""Prefix of every key, so that scanners for leaked secrets recognise it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry of the gateway's keys file."""

    name: str
    """Appears in logs. Keys of one name replace each other: the last is the newest, and those before it expire."""
    tenant: str
    """Tenant whose runs the key's holder sees."""
    sha256: str
    """SHA-256 of the key, lower-case hex."""
    created: datetime | None = None
    """When it was made, UTC; None if the file does not say."""
    expires: datetime | None = None
    """From when on it is refused, UTC; None means never."""

    def has_expired(self, now: datetime) -> bool:
        """Return whether the key is refused at a time because it has expired."""
        return self.expires is not None and now >= self.expires


def new_token() -> str:
    """Generate a key, as its holder sends it."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the SHA-256 under which a key is stored, lower-case hex."""
    return sha256(token.encode()).hexdigest()


_OF_NO_KEY = frozenset(map(hash_token, ("", " ", "\n", "\r\n", "\t", PREFIX, PREFIX + "\n")))
"""What `hash_token` and `sha256sum` make of an empty file or variable."""


def made_now(name: str, tenant: str, token: str, expires: datetime | None = None) -> ApiKey:
    """Return the entry of a key that was just made. Times are kept in seconds."""
    return ApiKey(name, tenant, hash_token(token), now(), expires)


def now() -> datetime:
    """Return the time in UTC, in whole seconds, as the file has it."""
    return datetime.now(UTC).replace(microsecond=0)


def in_rfc_3339(moment: datetime) -> str:
    """Return a time as the file and messages have it, such as 2026-01-31T12:00:00Z."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a keys file. Raises InvalidArgument that names the problem."""
    keys = read_json(path, "keys_file", "a list of name, tenant, sha256, created, expires", _parse)
    try:
        _check_all(keys)
    except errors.InvalidArgument as error:
        if error.field != "keys_file":
            raise
        raise errors.InvalidArgument(f"{path} {error.message}", field="keys_file") from error
    return keys


def update_keys(path: Path, change: Callable[[tuple[ApiKey, ...]], Iterable[ApiKey]], mode: int = 0o600) -> None:
    """Replace the keys in a file by what `change` makes of them; processes that do so at the same time take turns.

    A file that does not exist has no keys, and is made with `mode`; one that stays the same is not written. Raises
    InvalidArgument if the file cannot be locked, read or written, and what `change` raises.
    """

    def checked(before: tuple[ApiKey, ...] | None) -> tuple[ApiKey, ...]:
        after = tuple(change(before or ()))
        _check_all(after)
        return after

    update_json(path, "keys_file", read_keys, checked, lambda keys: list(map(_to_json, keys)), mode)


def _parse(entries: Any) -> tuple[ApiKey, ...]:
    if not isinstance(entries, list):
        raise ValueError(f"it is a {type(entries).__name__}")
    return tuple(map(_from_json, entries))


def _from_json(entry: Any) -> ApiKey:
    """Return the key of an entry. Raises ValueError or TypeError for what is none."""
    if not isinstance(entry, dict):
        raise ValueError(f"an entry is a {type(entry).__name__}")
    times = {name: _time(entry[name], name) for name in ("created", "expires") if entry.get(name) is not None}
    return ApiKey(**{**entry, **times})


def _time(text: object, field: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(f"{field} is not a time such as {in_rfc_3339(now())}")
    return moment.astimezone(UTC)


def _to_json(key: ApiKey) -> dict[str, str]:
    times = {"created": key.created, "expires": key.expires}
    dated = {name: in_rfc_3339(moment) for name, moment in times.items() if moment is not None}
    return {"name": key.name, "tenant": key.tenant, "sha256": key.sha256, **dated}


def _check_all(keys: tuple[ApiKey, ...]) -> None:
    newest: dict[str, ApiKey] = {}
    for key in keys:
        _check(key)
        before = newest.get(key.name)
        # Only a rotation leaves two keys of one name; its older one expires, and logs tell them by nothing else.
        if before is not None and (before.expires is None or before.tenant != key.tenant):
            raise errors.InvalidArgument(f"has two keys with the name {key.name}; remove one", field="keys_file")
        newest[key.name] = key


def _check(key: ApiKey) -> None:
    for field, value in (("tenant", key.tenant), ("name", key.name)):
        if not is_tenant(value):
            raise errors.InvalidArgument("must be 1 to 64 characters of [A-Za-z0-9._-]", field=field)
    if not isinstance(key.sha256, str) or not _SHA256.fullmatch(key.sha256):
        raise errors.InvalidArgument(f"of key {key.name} is not 64 lower-case hex digits", field="sha256")
    if key.sha256 in _OF_NO_KEY:
        raise errors.InvalidArgument(
            f"of key {key.name} is that of an empty key; remove the entry, and make a key with `paceline keys add`",
            field="sha256",
        )
