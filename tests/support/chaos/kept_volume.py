"""What a file system may have kept of recorded calls after a power cut.

Only synced data is certain: a file's content when its fsync started, and a folder's names when its own did. Everything
else is open. A file system keeps a folder's later changes up to some point. Of a file's later contents it keeps, block
by block, the old one, the new one, one in between, or zeros, with some length in between. Folders and files are
independent: a rename may be kept without the data, and an unlink in a folder may be kept while the folder's own rename
is undone. Every journaling file system loses less than this; one without a journal may lose more: it may also reorder
the changes of one folder.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from random import Random

from support.chaos.file_recorder import Call

BLOCK = 512
"""Bytes that a disk writes atomically."""


class Kept(Enum):
    """What was kept of unsynced changes."""

    EVERYTHING = auto()
    """As when only the processes are killed."""
    NOTHING = auto()
    NAMES = auto()
    """Names without data: files have their new length, with zeros for unsynced content."""
    CONTENTS = auto()
    """Data without names."""
    ANYTHING = auto()
    """Chosen at random."""


@dataclass
class _File:
    synced: bytes = b""
    later: list[bytes] = field(default_factory=list)

    @property
    def newest(self) -> bytes:
        return self.later[-1] if self.later else self.synced


@dataclass
class _Folder:
    synced: dict[str, int] = field(default_factory=dict)
    later: list[dict[str, int]] = field(default_factory=list)

    @property
    def newest(self) -> dict[str, int]:
        return self.later[-1] if self.later else self.synced


class KeptVolume:
    """A recorded folder on a disk, up to some call."""

    def __init__(self) -> None:
        self._folders: dict[int, _Folder] = {1: _Folder()}
        self._files: dict[int, _File] = {}

    def apply(self, call: Call) -> None:
        """Apply a call."""
        for number in call.folders:
            self._folders[number] = _Folder()
        for number, content in call.contents.items():
            self._files.setdefault(number, _File()).later.append(content)
        for number in sorted({change.folder for change in call.changes}):
            folder = self._folders[number]
            names = dict(folder.newest)
            for change in call.changes:
                if change.folder == number:
                    names.pop(change.name, None)
                    if change.after:
                        names[change.name] = change.after
            folder.later.append(names)
        if call.synced in self._folders:
            folder = self._folders[call.synced]
            folder.synced, folder.later = folder.newest, []
        elif call.synced in self._files:
            file = self._files[call.synced]
            file.synced, file.later = file.newest, []

    def write(self, root: Path, kept: Kept, random: Random) -> None:
        """Write the folder as it may have been kept."""
        made: dict[int, Path] = {}
        self._write(root, 1, kept, random, made)

    def _write(self, path: Path, number: int, kept: Kept, random: Random, made: dict[int, Path]) -> None:
        path.mkdir()
        made[number] = path
        for name, child in _names(self._folders[number], kept, random).items():
            if child in self._folders:
                if child not in made:  # already made if half of a rename between folders was kept
                    self._write(path / name, child, kept, random, made)
            elif child in made:
                (path / name).hardlink_to(made[child])
            else:
                (path / name).write_bytes(_content(self._files[child], kept, random))
                made[child] = path / name


def _names(folder: _Folder, kept: Kept, random: Random) -> dict[str, int]:
    if kept in {Kept.EVERYTHING, Kept.NAMES}:
        return folder.newest
    if kept is Kept.ANYTHING:
        return random.choice([folder.synced, *folder.later])
    return folder.synced


def _content(file: _File, kept: Kept, random: Random) -> bytes:
    if kept in {Kept.EVERYTHING, Kept.CONTENTS}:
        return file.newest
    if kept is Kept.NOTHING or not file.later:
        return file.synced
    contents = [file.synced, *file.later]
    if kept is Kept.NAMES:
        # Synced content stays; what was truncated or appended is unknown.
        length = min(map(len, contents))
        return file.synced[:length].ljust(len(file.newest), b"\0")
    length = random.choice([*map(len, contents), random.randint(min(map(len, contents)), max(map(len, contents)))])
    starts = range(0, length, BLOCK)
    blocks = (_block(contents, start, min(BLOCK, length - start), random) for start in starts)
    return b"".join(blocks)


def _block(contents: list[bytes], start: int, length: int, random: Random) -> bytes:
    """Choose one of the blocks that were written at this place, or zeros beyond the end of a content."""
    choices = [content[start : start + length].ljust(length, b"\0") for content in contents]
    if len({*choices}) == 1 and start + length <= len(contents[0]):
        return choices[0]
    return random.choice(choices)
