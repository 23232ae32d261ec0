"""Make, rotate, expire and remove keys of a keys file."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from paceline import errors
from paceline.files.api_keys import ApiKey, made_now, new_token, now, update_keys

Keys = tuple[ApiKey, ...]
_MAX_YEARS = timedelta(days=36500)


def add_key(path: Path, tenant: str, name: str, lifetime: timedelta | None = None) -> str:
    """Create a key, store its hash and return the key, this once. It expires after `lifetime`; None means never.

    Raises InvalidArgument if the name is taken, or the file cannot be locked, read or written.
    """
    token = new_token()
    key = made_now(name, tenant, token, None if lifetime is None else _after(lifetime))

    def add(keys: Keys) -> Keys:
        if any(other.name == name for other in keys):
            raise errors.InvalidArgument(f"{name} exists; choose another name, rotate or remove it", field="name")
        return (*keys, key)

    update_keys(path, add)
    return token


def rotate_key(path: Path, name: str, grace: timedelta, lifetime: timedelta | None = None) -> str:
    """Replace a key by a new one of the same name and tenant; return the new one, this once.

    The old one stays valid for `grace`, or until it expires if that is sooner; entries of the name that have expired
    are removed. Without `lifetime` the new key lives as long as the old one was to.

    Raises InvalidArgument if no key has the name, the old one's lifetime is unknown, or the file cannot be locked, read
    or written.
    """
    token = new_token()

    def rotate(keys: Keys) -> Keys:
        old = _newest(keys, name)
        lives = lifetime
        if lives is None and old.expires is not None:
            if old.created is None:
                raise errors.InvalidArgument(
                    f"{name} expires, but nothing says when it was made: give the lifetime of the new key", field="name"
                )
            lives = old.expires - old.created
        ends = _after(grace)
        kept = [_until(ends, key) if key.name == name else key for key in keys]
        new = made_now(name, old.tenant, token, None if lives is None else _after(lives))
        return (*(key for key in kept if key.name != name or not key.has_expired(now())), new)

    update_keys(path, rotate)
    return token


def expire_key(path: Path, name: str, after: timedelta | None) -> datetime | None:
    """Set when the newest key of a name expires, and return it; None means never. Its older ones expire no later.

    Raises InvalidArgument if no key has the name, or the file cannot be locked, read or written.
    """
    ends = None if after is None else _after(after)

    def expire(keys: Keys) -> Keys:
        newest = _newest(keys, name)

        def changed(key: ApiKey) -> ApiKey:
            if key is newest:
                return replace(key, expires=ends)
            return _until(ends, key) if key.name == name and ends is not None else key

        return tuple(map(changed, keys))

    update_keys(path, expire)
    return ends


def remove_key(path: Path, name: str) -> None:
    """Remove all keys of a name; their holders' next calls are refused.

    Raises InvalidArgument if no key has the name, or the file cannot be locked, read or written.
    """

    def remove(keys: Keys) -> Keys:
        _newest(keys, name)
        return tuple(key for key in keys if key.name != name)

    update_keys(path, remove)


def _newest(keys: Keys, name: str) -> ApiKey:
    """Return the newest key of a name. Raises InvalidArgument if there is none."""
    found = [key for key in keys if key.name == name]
    if not found:
        raise errors.InvalidArgument(f"no key is named {name}; `paceline keys list` shows those that are", field="name")
    return found[-1]


def _until(end: datetime, key: ApiKey) -> ApiKey:
    """Return a key that expires at `end`, or when it did before if that is sooner."""
    return replace(key, expires=end if key.expires is None else min(end, key.expires))


def _after(seconds: timedelta) -> datetime:
    return now() + min(seconds, _MAX_YEARS)
