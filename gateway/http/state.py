"""The folder of the HTTP APIs' state: its lock, and what is said of its trouble."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from paceline import errors

_MOST_HOLDER = 200
"""Most bytes of a holder's description that are read."""
_LEAST_FREE = 64 << 10
"""Bytes below which a disk is full to SQLite, which writes whole pages and extends its files by blocks."""
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_REMEDIES = {
    sqlite3.SQLITE_FULL: "its disk is full; make room there",
    sqlite3.SQLITE_READONLY: "it is read-only; let the gateway write there",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; let the gateway's user read and write the folder and its files",
    sqlite3.SQLITE_PERM: "it may not be used; let the gateway's user read and write the folder and its files",
    sqlite3.SQLITE_IOERR: "its disk fails; see the kernel's log",
    sqlite3.SQLITE_BUSY: "another process uses it; end that process",
    sqlite3.SQLITE_LOCKED: "another process uses it; end that process",
}
"""What is wrong and what to do, by SQLite's primary code."""
_CODES = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EDQUOT: sqlite3.SQLITE_FULL,
    errno.EFBIG: sqlite3.SQLITE_FULL,  # the limit of a file's size
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EACCES: sqlite3.SQLITE_PERM,
    errno.EPERM: sqlite3.SQLITE_PERM,
    errno.EIO: sqlite3.SQLITE_IOERR,
}


class StateUnusable(errors.Unavailable):
    """The HTTP APIs' state cannot be read or written now. Known to HTTP callers only."""

    reason: ClassVar[str] = "HTTP_STATE_UNUSABLE"
    default_retry_after = 5.0

    def __init__(self, message: str, *, is_damage: bool = False) -> None:
        super().__init__(message)
        self.is_damage = is_damage
        """Whether a file's content is at fault, so that the file has to be replaced."""


def trouble_of(path: Path, error: Exception) -> StateUnusable | None:
    """Return what an error of a file means to the operator; None if it is not of the file or its disk.

    Only damage is a reason to set a file aside: with every other trouble its content is intact.
    """
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    else:
        number = error.errno if isinstance(error, OSError) else None
        code = _CODES.get(number or 0, sqlite3.SQLITE_CANTOPEN if number else sqlite3.SQLITE_OK)
    if code in _DAMAGE:
        return StateUnusable(
            f"{path} is damaged ({error}); set it aside, with the files beside it whose names begin alike, to begin "
            "with an empty one",
            is_damage=True,
        )
    if code in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}:
        code = _code_of_disk(path.parent) or code
    return StateUnusable(f"{path}: {_REMEDIES[code]} ({error})") if code in _REMEDIES else None


def _code_of_disk(folder: Path) -> int | None:
    """Return what is wrong with a folder's disk: SQLite has other codes, too, for a full or a read-only one."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        if disk.f_flag & os.ST_RDONLY:
            return sqlite3.SQLITE_READONLY
        if disk.f_bavail * disk.f_frsize < _LEAST_FREE or (disk.f_files and not disk.f_favail):
            return sqlite3.SQLITE_FULL
    return None


class StateLock:
    """Keeps other gateways out of a folder until it is closed, or its process ends."""

    def __init__(self, folder: Path, holder: str) -> None:
        """Create the folder and lock it. `holder` describes this gateway to another one. Raises StateUnusable."""
        path = folder / ".lock"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise trouble_of(path, error) or error from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            by = os.pread(self._file, _MOST_HOLDER, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            if not isinstance(error, BlockingIOError):
                raise trouble_of(path, error) or error from error
            message = f"{folder} is used by another gateway ({by}); end that one, or give this one its own http_state"
            raise StateUnusable(message) from None
        with suppress(OSError):  # a full disk: the lock holds without a description
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}, {holder}\n".encode(), 0)

    def close(self) -> None:
        """Let another gateway have the folder."""
        os.close(self._file)
