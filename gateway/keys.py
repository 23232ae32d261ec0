"""API keys, in a JSON file that holds each key's name, tenant and SHA-256, but never the key itself.

python -m gateway.keys add --file keys.json --tenant team-a --name laptop
python -m gateway.keys remove --file keys.json --name laptop
"""

from __future__ import annotations

import argparse
import hmac
import os
import re
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import errors
from paceline.api_keys import ApiKey, dump_keys, hash_token, new_token, parse_keys
from paceline.log import get_logger
from paceline.rpc.identity import Identity, is_tenant

_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = get_logger(__name__)


class KeyRing:
    """The keys of a file, reloaded when the file changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises InvalidArgument when it cannot be read or has no key."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = read_keys(path)
        if not self._keys:
            raise errors.InvalidArgument("has no key; make one with `python -m gateway.keys add`", field="keys_file")

    def identify(self, token: str) -> Identity | None:
        self._refresh()
        digest, found = hash_token(token), None
        # No early exit, so that timing does not reveal which key nearly matched.
        for key in self._keys:
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return Identity(found.tenant, found.name) if found else None

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except errors.InvalidArgument as error:
            _log.error("keys file is unusable; the previous keys stay valid", error=str(error))
        else:
            _log.info("keys file reloaded", keys=len(self._keys))


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a keys file. Raises InvalidArgument that names the problem."""
    try:
        keys = parse_keys(path.read_text())
    except (OSError, ValueError, TypeError) as error:
        raise errors.InvalidArgument(
            f"{path} is not a list of name, tenant, sha256: {error}", field="keys_file"
        ) from error
    for key in keys:
        _check(key)
    if len({key.name for key in keys}) != len(keys):
        raise errors.InvalidArgument(f"{path} has two keys with the same name", field="keys_file")
    return keys


def add_key(path: Path, tenant: str, name: str) -> str:
    """Create a key, store its hash and return the key, this once. Raises InvalidArgument if the name is taken."""
    keys = read_keys(path) if path.exists() else ()
    token = new_token()
    key = ApiKey(name, tenant, hash_token(token))
    _check(key)
    if any(other.name == name for other in keys):
        raise errors.InvalidArgument(f"{name} exists; choose another name or remove it first", field="name")
    _write(path, (*keys, key))
    return token


def remove_key(path: Path, name: str) -> None:
    """Remove a key; its holder's next call is refused. Raises InvalidArgument if the key does not exist."""
    keys = read_keys(path)
    left = tuple(key for key in keys if key.name != name)
    if len(left) == len(keys):
        raise errors.InvalidArgument(f"no key is named {name}", field="name")
    _write(path, left)


def _check(key: ApiKey) -> None:
    for field, value in (("tenant", key.tenant), ("name", key.name)):
        if not is_tenant(value):
            raise errors.InvalidArgument("must be 1 to 64 characters of [A-Za-z0-9._-]", field=field)
    if not isinstance(key.sha256, str) or not _SHA256.fullmatch(key.sha256):
        raise errors.InvalidArgument(f"of key {key.name} is not 64 lower-case hex digits", field="sha256")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    staging = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            if path.exists():
                # Keep the mode, so that a gateway that runs as another user can still read the file.
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(dump_keys(keys))
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command-line interface."""
    parser = argparse.ArgumentParser(prog="python -m gateway.keys", description="Make and remove API keys.")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="make a key and print it, once")
    add.add_argument("--tenant", required=True, help="whose runs its holder sees")
    remove = commands.add_parser("remove", help="remove a key")
    for command in (add, remove):
        command.add_argument("--file", type=Path, required=True, help="the gateway's keys file")
        command.add_argument("--name", required=True, help="name of the key, for logs")
    given = parser.parse_args(arguments)
    try:
        if given.command == "add":
            sys.stdout.write(add_key(given.file, given.tenant, given.name) + "\n")
        else:
            remove_key(given.file, given.name)
    except errors.InvalidArgument as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
