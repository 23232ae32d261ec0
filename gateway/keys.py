"""The gateway's API keys: who holds one, and the commands that make and remove them.

python -m paceline.services gateway.keys add --file keys.json --tenant team-a --name laptop
python -m paceline.services gateway.keys remove --file keys.json --name laptop
"""

from __future__ import annotations

import argparse
import hmac
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import errors
from paceline.files.api_keys import ApiKey, hash_token, new_token, read_keys, update_keys
from paceline.log import get_logger
from paceline.rpc.identity import Identity

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
            raise errors.InvalidArgument(
                "has no key; make one with `python -m paceline.services gateway.keys add`", field="keys_file"
            )

    def identify(self, token: str) -> Identity | None:
        if not token.strip():
            return None  # whatever the file holds
        self._refresh()
        digest, found = hash_token(token), None
        # No early exit, so that timing does not reveal which key nearly matched.
        for key in self._keys:
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return _identity(found) if found else None

    def still_admits(self, identity: Identity) -> bool:
        self._refresh()
        return any(
            (key.tenant, key.name, _identity(key).credential)
            == (identity.tenant, identity.key_name, identity.credential)
            for key in self._keys
        )

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


def _identity(key: ApiKey) -> Identity:
    return Identity(key.tenant, key.name, hash_token(f"credential of {key.sha256}")[:32])


def add_key(path: Path, tenant: str, name: str) -> str:
    """Create a key, store its hash and return the key, this once.

    Raises InvalidArgument if the name is taken, or the file cannot be locked, read or written.
    """
    token = new_token()

    def add(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if any(other.name == name for other in keys):
            raise errors.InvalidArgument(f"{name} exists; choose another name or remove it first", field="name")
        return (*keys, ApiKey(name, tenant, hash_token(token)))

    update_keys(path, add)
    return token


def remove_key(path: Path, name: str) -> None:
    """Remove a key; its holder's next call is refused.

    Raises InvalidArgument if the key does not exist, or the file cannot be locked, read or written.
    """

    def remove(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        left = tuple(key for key in keys if key.name != name)
        if len(left) == len(keys):
            raise errors.InvalidArgument(f"no key is named {name}", field="name")
        return left

    update_keys(path, remove)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # The time of change also moves with mode and owner, and nobody can set it back.
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command-line interface."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.services gateway.keys", description="Make and remove API keys."
    )
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
