"""A file whose content is read again when the file changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from paceline import errors
from paceline.log import get_logger

T = TypeVar("T")
_log = get_logger(__name__)


class ReloadedFile(Generic[T]):
    """Reads a file, and again when it changes. If that fails, what was read before stays."""

    def __init__(self, path: Path, what: str, read: Callable[[Path], T]) -> None:
        """Read the file, which the log calls `what`. Raises the InvalidArgument that `read` raises."""
        self._path = path
        self._what = what
        self._read = read
        self._stamp = _stamp(path)
        """Of the file that the content was read from."""
        self.content = read(path)
        self._logged: object = None
        """The failure that was logged last: calls that fail alike are logged once."""

    def refresh(self) -> bool:
        """Read the file again if it changed; return whether the content is new."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        try:
            self.content = self._read(self._path)
        except errors.InvalidArgument as error:
            # The stamp stays, so that the next call reads again: the file may be whole and the reading have failed.
            failure = stamp, str(error)
            if failure != self._logged:
                self._logged = failure
                _log.error(f"{self._what} is unusable; what it said before holds", error=str(error))
            return False
        self._stamp, self._logged = stamp, None
        _log.info(f"{self._what} reloaded")
        return True


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # The time of change also moves with mode and owner, and nobody can set it back.
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino
