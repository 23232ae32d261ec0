"""A file whose memory is allocated before it is needed, so that a publish does not wait for pages to be cleared.

On two cores of an AMD EPYC, writing 20 MB to a new file in memory took 11 to 13 ms, and to an allocated one 5 ms.
`make demo` published in 77 ms at the median instead of 89 ms (two runs of each in turns, a 20 MB adapter).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

from paceline import layout

_ROOM = 4
"""A file is allocated only where this many times its size is free, because others need room there, too."""


class PreallocatedFile:
    """At most one unnamed file for the next adapter; it disappears with the process. Any thread may call any method."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._lock = Lock()

    def write(self, path: Path, parts: Iterable[bytes | memoryview], size: int) -> None:
        """Write `parts` of `size` bytes to `path`, by the preallocated file if it fits. Raises OSError.

        Then allocate the next one in the background, beside the directory, if its file system has ample room.
        """
        descriptor, is_new = self._exchange(None), False
        if descriptor is None or not _fits(descriptor, path, size):
            self._close(descriptor)
            descriptor, is_new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), True
        try:
            for part in parts:
                layout.write_all(descriptor, part)
            if not is_new:
                _link(descriptor, path)
        finally:
            os.close(descriptor)
        beside = path.parent.parent
        Thread(target=self._prepare, args=(beside, size), name="preallocated file", daemon=True).start()

    def drop(self) -> None:
        """Free the file; one that is being allocated stays for the next adapter."""
        self._close(self._exchange(None))

    def _prepare(self, directory: Path, size: int) -> None:
        with suppress(OSError):  # no room, or no such directory any more: the next adapter gets a new file
            room = os.statvfs(directory)
            if room.f_bavail * room.f_frsize >= _ROOM * size:
                self._close(self._exchange(_allocate(directory, size)))

    def _exchange(self, descriptor: int | None) -> int | None:
        with self._lock:
            self._descriptor, previous = descriptor, self._descriptor
            return previous

    @staticmethod
    def _close(descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)


def _fits(descriptor: int, path: Path, size: int) -> bool:
    """Return whether an open file has `size` bytes and is on the file system of `path`."""
    found = os.fstat(descriptor)
    with suppress(FileNotFoundError):
        return (found.st_size, found.st_dev) == (size, path.parent.stat().st_dev)
    return False


def _allocate(directory: Path, size: int) -> int:
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _link(descriptor: int, path: Path) -> None:
    """Give an unnamed file a name."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With dst_dir_fd, os.link follows the link in /proc to the file instead of linking that link.
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=directory)
    finally:
        os.close(directory)
