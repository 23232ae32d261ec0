"""A lock on a folder, for a service that must be the only one to use it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline.files.regular_files import NotRegularFile, open_or_create, open_raw

_FILE = ".lock"
_MOST_HOLDER = 200
"""Most bytes of a holder's description that are read."""
_NO_FOLDER_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}
"""What file systems answer that lock nothing but files, such as NFS."""


class FolderInUse(Exception):
    """Another process holds the folder's lock; the text is its description, as far as it is known."""


class FolderLock:
    """Keeps other processes out of a folder until it is closed, or its process ends.

    It is two locks. The folder's own cannot be taken away: who removes `.lock` only brings about a new file that
    nobody has locked. The lock of that file also keeps out other machines, on disks that machines share.
    """

    def __init__(self, folder: Path, holder: str = "") -> None:
        """Lock a folder that exists. `holder` describes this process to another one.

        Raises FolderInUse, NotRegularFile if `.lock` is no file, OSError.
        """
        file = folder / _FILE
        with ExitStack() as undo:
            above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, above)
            try:
                _lock(above, file)
            except OSError as error:
                if error.errno not in _NO_FOLDER_LOCKS:
                    raise
            descriptor = open_or_create(file)
            undo.callback(os.close, descriptor)
            _lock(descriptor, file)
            self._held = undo.pop_all()
        with suppress(OSError):  # a full disk: the lock holds without a description
            os.ftruncate(descriptor, 0)
            who = ", ".join(part for part in (f"process {os.getpid()} on {socket.gethostname()}", holder) if part)
            os.pwrite(descriptor, f"{who}\n".encode(), 0)

    def close(self) -> None:
        """Let another process have the folder."""
        self._held.close()


def _lock(descriptor: int, file: Path) -> None:
    """Lock what a descriptor is of, without waiting. Raises FolderInUse, which quotes `file`, and OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderInUse(_holder_in(file)) from None
    except OSError as error:
        error.filename = str(file)  # flock names none
        raise


def _holder_in(file: Path) -> str:
    """Return how the holder describes itself in its file, which somebody may have removed."""
    try:
        with open_raw(file) as content:
            described = content.read(_MOST_HOLDER).decode(errors="replace").strip()
    except (OSError, NotRegularFile):
        described = ""
    return described or "unknown"
