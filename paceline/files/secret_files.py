"""Files that hold secrets: written whole or not at all, and never taken for a secret when they hold none."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.layout import sync_directory, write_all

MIN_SECRET_LENGTH = 16
"""Fewest characters of a secret that people and services send as text."""


def check_secret(secret: str) -> str:
    """Return a secret without surrounding whitespace. Raises ValueError if it is blank, short or cannot be a header."""
    secret = secret.strip()
    if not secret:
        raise ValueError("is empty")
    if len(secret) < MIN_SECRET_LENGTH or not (secret.isascii() and secret.isprintable()):
        raise ValueError(f"must be at least {MIN_SECRET_LENGTH} printable ASCII characters on one line")
    return secret


def read_secret(path: Path) -> str:
    """Return the secret in a file. Raises ValueError, naming the file, if it cannot be read or holds no secret."""
    try:
        return check_secret(path.read_text("ascii"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be a line of ASCII characters") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def read_pem(path: Path) -> bytes:
    """Return a PEM file. Raises ValueError, naming the file, if it cannot be read or holds nothing.

    gRPC takes an empty file of authorities for none at all, and trusts the system's instead.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise ValueError(f"{path} is not a PEM file: it has no line -----BEGIN ...-----")
    return content


def write_secret(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file durably: whenever the machine stops, the path holds the old content or all of the new.

    A file that is replaced keeps its mode, and its owner and group as far as this process may give files away. Hold the
    path's `lock`. Raises ValueError for blank content and OSError, naming the file, if it cannot be written.
    """
    if not content.strip():
        raise ValueError(f"a secret for {path} is empty")
    # A link stays one: others read the file that it names.
    path = path.resolve()
    staging = path.with_name(f".{path.name}.new")
    staging.unlink(missing_ok=True)  # left by a process that was killed
    try:
        file = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with suppress(FileNotFoundError):
                status = path.stat()
                _give(file, status)
                mode = stat.S_IMODE(status.st_mode)
            os.fchmod(file, mode)
            write_all(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        staging.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Keep others from writing secrets in a path's folder while the block runs. Raises OSError.

    The lock has a file of its own in the folder, because the file at the path is replaced.
    """
    file = os.open(path.with_name(".secrets.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
