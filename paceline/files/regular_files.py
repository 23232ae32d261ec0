"""Reading files below directories that others may write to: a link, a device or a pipe there is never opened.

A symbolic link could name any file that this process can read, and a pipe would block it. Folders above, such as the
root of a volume, are the operator's and may be links.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from io import BufferedReader, FileIO
from pathlib import Path

from paceline import errors

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a pipe would wait for a writer
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}
"""What may be where a file should be, by the kind in its mode."""


class NotRegularFile(errors.ChecksumMismatch):
    """What should be a file is a link, a folder, a device or a pipe."""

    def __init__(self, path: Path) -> None:
        self.kind = kind_of(path) or "something else"
        """What it is, with its article."""
        super().__init__(
            f"is {self.kind}, no regular file; links are not followed, put the file itself there", field=path.name
        )


def kind_of(path: Path) -> str:
    """Return what is at a path, with its article; empty for a regular file, for nothing, and if nobody can tell."""
    try:
        return _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "")
    except OSError:
        return ""


def open_raw(path: Path) -> FileIO:
    """Open a regular file for reading, without a buffer. Raises NotRegularFile, FileNotFoundError, OSError."""
    return FileIO(_open(path, os.O_RDONLY), "rb")


def open_or_create(path: Path) -> int:
    """Return a descriptor of a regular file, to read and write; one that is made is this user's alone.

    Raises NotRegularFile, OSError.
    """
    return _open(path, os.O_RDWR | os.O_CREAT)


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, _FLAGS | flags, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:  # a link; a socket; a folder that is written to
            raise NotRegularFile(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # FileIO would refuse a folder with another error
        os.close(descriptor)
        raise NotRegularFile(path)
    return descriptor


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises as `open_raw`."""
    return BufferedReader(open_raw(path))


def read_file(path: Path) -> bytes:
    """Return a regular file's content. Raises as `open_raw`."""
    with open_raw(path) as file:
        return file.readall()


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file's content to a new file. Raises as `open_raw`, and FileExistsError."""
    with open_raw(source) as content, target.open("xb", 0) as copy:
        shutil.copyfileobj(content, copy, 1 << 20)


def link_file(source: Path, target: Path) -> None:
    """Create another hard link to a regular file. Raises as `open_raw`, and OSError if links are not supported."""
    os.link(source, target, follow_symlinks=False)
    if not stat.S_ISREG(target.lstat().st_mode):
        target.unlink()
        raise NotRegularFile(source)


def lstat_files(directory: Path) -> dict[str, os.stat_result]:
    """Return the status of each file of a flat directory by name. Raises NotRegularFile for anything else in it."""
    found = {path.name: path.lstat() for path in sorted(directory.iterdir())}
    if odd := next((name for name, status in found.items() if not stat.S_ISREG(status.st_mode)), None):
        raise NotRegularFile(directory / odd)
    return found


def open_folder(directory: Path, names: int = 2) -> int:
    """Return a descriptor of a folder; its last `names` names must not be links.

    Raises FileNotFoundError, NotADirectoryError, also for a link.
    """
    names = min(names, len(directory.parts) - 1)
    descriptor = os.open(directory.parents[names - 1] if names else directory, _FOLDER)
    for name in directory.parts[len(directory.parts) - names :]:
        above = descriptor
        try:
            descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotADirectoryError(errno.ENOTDIR, "is a link", str(directory)) from error
            raise
        finally:
            os.close(above)
    return descriptor
