"""A file in memory, allocated before it is needed: a publish converts weights directly into it and then links it.

Otherwise a file's pages would be allocated, cleared and copied to while samplers wait.
"""

from __future__ import annotations

import os
import threading
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

_NICENESS = 10
"""Niceness of the thread that makes a file, so that it takes little time from a publish on the same core."""
_ROOM = 4
"""A file is made only where this many times its size is free: others need room there, too."""
_PAGE_BYTES = 4096
SERIAL_ELEMENTS = 32_767
"""Elements that torch copies or sets without starting threads, which would compete with the arithmetic's threads."""


class MappedFile:
    """An unnamed file with allocated pages; unless it is linked, it disappears with the process."""

    def __init__(self, directory: Path, size: int) -> None:
        """Allocate a file of `size` bytes in a directory's file system. Raises OSError."""
        self.size = size
        self._descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            self._map = mmap(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._content = torch.frombuffer(self._map, dtype=torch.uint8)
        # MADV_POPULATE_WRITE takes half the time, but Python holds the GIL during the call.
        for pages in torch.split(self._content[::_PAGE_BYTES], SERIAL_ELEMENTS):
            pages.zero_()

    def begin(self, header: bytes) -> Tensor:
        """Write `header` to the file; return the rest of it (uint8), which nothing may use after `close`."""
        self._map[: len(header)] = header
        return self._content[len(header) :]

    def link(self, path: Path) -> None:
        """Give the file a name in its file system. Raises OSError."""
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # With dst_dir_fd, os.link follows the link in /proc to the file instead of linking that link.
            os.link(f"/proc/self/fd/{self._descriptor}", path.name, dst_dir_fd=directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Close the file."""
        del self._content
        self._map.close()
        os.close(self._descriptor)


class SpareFile:
    """At most one file in memory, made in the background. Any thread may call any method."""

    def __init__(self) -> None:
        self._file: MappedFile | None = None
        self._drops = 0
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def take(self, size: int) -> MappedFile | None:
        """Hand the file to the caller if one of `size` bytes exists; close one of another size."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None and file.size != size:
            file.close()
            return None
        return file

    def prepare(self, directory: Path, size: int, used: MappedFile | None = None) -> None:
        """Start making a file of `size` bytes, if `directory` is in memory and has room; also close `used`."""
        arguments = (directory, size, used, self._drops)
        threading.Thread(target=self._make, args=arguments, name="spare file", daemon=True).start()

    def drop(self) -> None:
        """Discard the file, including one that is being made."""
        with self._lock:
            file, self._file = self._file, None
            self._drops += 1
        if file is not None:
            file.close()

    def _make(self, directory: Path, size: int, used: MappedFile | None, drops: int) -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS))
        if used is not None:
            used.close()
        with self._making:
            if self._drops != drops or ((there := self._file) is not None and there.size == size):
                return
            file = _new_file(directory, size)
            with self._lock:
                if self._drops == drops:
                    file, self._file = self._file, file
            if file is not None:
                file.close()


def _new_file(directory: Path, size: int) -> MappedFile | None:
    try:
        room = os.statvfs(directory)
        if _is_in_memory(directory) and room.f_bavail * room.f_frsize >= _ROOM * size:
            return MappedFile(directory, size)
    except OSError:  # The directory's run was deleted, or there is no room left: the next file is written normally.
        pass
    return None


def _is_in_memory(directory: Path) -> bool:
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    return any(mount[2] == number and mount[mount.index("-") + 1] == "tmpfs" for mount in mounts)
