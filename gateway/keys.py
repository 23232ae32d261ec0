"""API keys, in a JSON file that holds each key's name, tenant and SHA-256, but never the key itself.

python -m gateway.keys add --file keys.json --tenant team-a --name laptop
python -m gateway.keys remove --file keys.json --name laptop
"""

from __future__ import annotations

import argparse
import fcntl
import hmac
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
        """Of the file that the keys were read from."""
        self._keys = read_keys(path)
        self._logged: object = None
        """The failure that was logged last: calls that fail alike are logged once."""
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
        try:
            self._keys = read_keys(self._path)
        except errors.InvalidArgument as error:
            # The stamp stays, so that the next call reads again: the file may be whole and the reading have failed.
            failure = stamp, str(error)
            if failure != self._logged:
                self._logged = failure
                _log.error("keys file is unusable; the previous keys stay valid", error=str(error))
        else:
            self._stamp, self._logged = stamp, None
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
    """Create a key, store its hash and return the key, this once.

    Raises InvalidArgument if the name is taken, or the file cannot be locked or read.
    """
    token = new_token()
    key = ApiKey(name, tenant, hash_token(token))
    _check(key)
    with _locked(path):
        keys = read_keys(path) if path.exists() else ()
        if any(other.name == name for other in keys):
            raise errors.InvalidArgument(f"{name} exists; choose another name or remove it first", field="name")
        _write(path, (*keys, key))
    return token


def remove_key(path: Path, name: str) -> None:
    """Remove a key; its holder's next call is refused.

    Raises InvalidArgument if the key does not exist, or the file cannot be locked or read.
    """
    with _locked(path):
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
    # The time of change also moves with mode and owner, and nobody can set it back.
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other commands from changing the keys file while the block runs. Raises InvalidArgument if that fails.

    The lock has a file of its own, because the keys file is replaced.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise errors.InvalidArgument(
            f"{lock} cannot be opened: {error.strerror}; run this as the user who owns {path}", field="keys_file"
        ) from error
    try:
        if path.exists():
            _give(file, path.stat())
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _give(file: int, status: os.stat_result) -> None:
    """Give a file the owner and group of another, as far as this process may: root may give it to any."""
    for owner in ((status.st_uid, -1), (-1, status.st_gid)):
        with suppress(PermissionError):
            os.fchown(file, *owner)


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    staging = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            if path.exists():
                # Keep mode and owner, so that a gateway that runs as another user can still read the file.
                status = path.stat()
                _give(file.fileno(), status)
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
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
