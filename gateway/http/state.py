"""The folder of the HTTP APIs' state: its lock, and what is said of its trouble."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from paceline import errors
from paceline.files.folder_lock import FolderInUse, FolderLock
from paceline.files.regular_files import NotRegularFile, kind_of

_LEAST_FREE = 64 << 10
"""Bytes below which a disk is full to SQLite, which writes whole pages and extends its files by blocks."""
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_REMEDIES = {
    sqlite3.SQLITE_FULL: "its disk is full; free space there",
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

    An error that names a file is of that one, such as a file that is written to replace `path`. Only damage is a reason
    to set a file aside: with every other trouble its content is intact.
    """
    if isinstance(error, OSError) and isinstance(error.filename, str):
        path = Path(error.filename)
    if isinstance(error, NotRegularFile | IsADirectoryError):
        kind = error.kind if isinstance(error, NotRegularFile) else "a folder"
        return StateUnusable(
            f"{path} is {kind}, and the gateway needs a regular file there (links are not followed); move it away, and "
            "put the file itself there if there is one"
        )
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


@contextmanager
def in_state(path: Path) -> Iterator[None]:
    """Raise StateUnusable for an error of a file of the state, in the block that opens or reads it."""
    try:
        yield
    except (OSError, sqlite3.Error, NotRegularFile) as error:
        raise trouble_of(path, error) or error from error


def check_kind(path: Path) -> None:
    """Raise NotRegularFile if something else is at the path, for what SQLite opens: it would follow a link."""
    if kind_of(path):
        raise NotRegularFile(path)


def lock_state(folder: Path, holder: str) -> FolderLock:
    """Create the folder and lock it. `holder` describes this gateway to another one. Raises StateUnusable."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError) as error:
        message = f"{folder} is no folder, or is below a file; move that away, or choose another http_state ({error})"
        raise StateUnusable(message) from error
    except OSError as error:
        raise trouble_of(folder, error) or error from error
    with in_state(folder / ".lock"):
        try:
            return FolderLock(folder, holder)
        except FolderInUse as error:
            message = (
                f"{folder} is used by another gateway ({error}); end that one, or give this one its own http_state"
            )
            raise StateUnusable(message) from None
