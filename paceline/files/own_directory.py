"""A directory owned by one process, removed when the process ends or when the next of its kind is created."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

_LOCK = "lock"
_NAMED_WITHIN_SECONDS = 60.0


class OwnDirectory:
    """A new directory below `root`, readable only by this user; a lock in it shows that its owner is alive."""

    def __init__(self, root: Path, kind: str) -> None:
        """Remove directories of this `kind` whose owners died without cleaning up, and create a new one."""
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{kind}-*"):
            _remove_abandoned(left)
        for left in root.glob(f".{kind}-*"):
            _remove_unnamed(left)
        self.path = root / f"{kind}-{uuid4().hex}"
        # The lock is taken before the directory gets the name by which other processes look for abandoned ones.
        unnamed = root / f".{self.path.name}"
        unnamed.mkdir(mode=0o700)
        self._lock = os.open(unnamed / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path)

    def close(self) -> None:
        """Remove the directory and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_unnamed(directory: Path) -> None:
    """Remove a directory whose creator died before renaming it. A jump of the clock does not make a live one old."""
    with suppress(OSError):  # renamed or removed concurrently
        if time.time() - directory.stat().st_mtime > _NAMED_WITHIN_SECONDS:
            if (directory / _LOCK).exists():
                _remove_abandoned(directory)
            else:
                shutil.rmtree(directory, ignore_errors=True)


def _remove_abandoned(directory: Path) -> None:
    """Remove a directory whose owner is gone: its lock is free."""
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR)
    except OSError:  # another user's, or removed concurrently
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:  # in use
        return
    finally:
        os.close(lock)
