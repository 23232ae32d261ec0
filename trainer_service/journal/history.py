"""Read a run's journal, and its index.

The index is journal.json beside the journal's directory: what must be known even if the journal cannot be read. It
names the newest segment, so that its loss is detected, and reserves seq_ids ahead, so that a seq_id that may have been
accepted is never accepted again after the journal was lost.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline import layout
from paceline.files.regular_files import open_file, read_file
from paceline.log import get_logger
from trainer_service.journal.format import (
    AnswerRecord,
    AttemptRecord,
    CancelRecord,
    CommandRecord,
    Header,
    JournalDamagedError,
    RebaseRecord,
    Record,
    Segment,
    SegmentName,
    check_magic,
    decode_segment,
)
from trainer_service.volume_files import DamagedFileError, decode_checked, read_own, write_checked

RESERVED = 1024
"""Number of seq_ids that one write of the index reserves."""
_NAME = re.compile(r"(\d{20})-(\d{4,})\.journal")

_log = get_logger(__name__)


class Index(msgspec.Struct, frozen=True):
    """The content of journal.json."""

    base: int
    generation: int
    limit: int
    """seq_ids up to this one may have been accepted."""

    @property
    def newest(self) -> SegmentName:
        """Name of the newest segment."""
        return SegmentName(self.base, self.generation)


def index_path(directory: Path) -> Path:
    """Return the path of the index of the journal in `directory`."""
    return directory.with_suffix(".json")


def read_index(directory: Path) -> Index | None:
    """Read a journal's index. Return None if there is none, or if it was damaged and set aside.

    Raises UnknownFormatError.
    """
    path = index_path(directory)
    if not path.exists():
        return None
    try:
        return decode_checked(read_own(path), Index, path.name)
    except DamagedFileError as error:
        aside = layout.quarantine(path)
        _log.error("journal's index damaged and set aside", path=str(path), aside=aside.name, error=str(error))
        return None


def write_index(directory: Path, newest: SegmentName, limit: int) -> None:
    """Write a journal's index durably. Raises DiskFull."""
    write_checked(index_path(directory), Index(newest.base, newest.generation, limit))


@dataclass(frozen=True, slots=True)
class End:
    """The end of a journal, where appending continues."""

    name: SegmentName
    header: Header
    good_bytes: int
    size: int
    """Size of the file; bytes beyond `good_bytes` are a torn tail."""


@dataclass(slots=True)
class History:
    """What a journal records about a run."""

    base: int
    """seq_id of the first command that the journal can hold."""
    commands: dict[int, CommandRecord] = field(default_factory=dict)
    """By seq_id, in order."""
    answers: dict[int, AnswerRecord] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    """How often the engine died while executing a command, by seq_id."""
    cancelled: set[int] = field(default_factory=set)
    """seq_ids of commands that were refused before they started."""
    end: End | None = None

    @property
    def last_seq_id(self) -> int:
        """Highest accepted seq_id."""
        return next(reversed(self.commands), self.base - 1)

    def add(self, segment: Segment) -> None:
        """Add a segment's records. Raises JournalDamagedError if a command is missing."""
        for record in segment.records:
            match record:
                case CommandRecord():
                    if record.seq_id != self.last_seq_id + 1:
                        raise JournalDamagedError(f"command {self.last_seq_id + 1} is missing")
                    self.commands[record.seq_id] = record
                case AnswerRecord():
                    self.answers[record.seq_id] = record
                case AttemptRecord():
                    self.attempts[record.seq_id] += 1
                case CancelRecord():
                    self.cancelled.add(record.seq_id)
                case RebaseRecord():
                    self.base = record.seq_id
                    self.commands.clear()

    def add_answers(self, records: Iterable[Record]) -> None:
        """Add the answers among records that the trainer remembers and has not written yet."""
        for record in records:
            if isinstance(record, AnswerRecord):
                self.answers[record.seq_id] = record


def segment_path(directory: Path, name: SegmentName) -> Path:
    """Return the path of a segment's file."""
    return directory / f"{name.base:020d}-{name.generation:04d}.journal"


def segments(directory: Path) -> dict[SegmentName, Path]:
    """Return a journal's segments, oldest first; other files are ignored."""
    found = (path for path in layout.entries(directory, "*.journal") if _NAME.fullmatch(path.name))
    return dict(sorted((_name(path), path) for path in found))


def check_formats(directory: Path) -> None:
    """Check that every segment has this format. Raises UnknownFormatError."""
    for path in segments(directory).values():
        with open_file(path) as file:
            check_magic(file.read(8), path.name)


def read_history(directory: Path, after: int = 0, newest: SegmentName | None = None) -> History:
    """Read a journal's commands after `after`; segments that hold only earlier ones are not read.

    `newest` is a segment that must exist. A torn tail is ignored. Raises JournalDamagedError, UnknownFormatError.
    """
    found = segments(directory)
    if not found:
        raise JournalDamagedError("the journal is missing")
    names = list(found)
    if newest is not None and newest > names[-1]:
        raise JournalDamagedError(f"{segment_path(directory, newest).name} is missing")
    # The command after `after` is in the last segment that starts at or before it.
    first = max((index for index, name in enumerate(names) if name.base <= after + 1), default=0)
    while first and names[first - 1].base == names[first].base:
        first -= 1
    history = History(names[first].base)
    segment, size = _read(found[names[first]])
    for name, successor in itertools.zip_longest(names[first:], names[first + 1 :]):
        following = _read(found[successor]) if successor else None
        if following is not None:
            segment = _up_to_successor(name, found[name], segment, size, following[0])
        if segment.is_damaged:
            raise JournalDamagedError(f"{found[name].name} is damaged after {segment.good_bytes} bytes")
        history.add(segment)
        history.end = End(name, segment.header, segment.good_bytes, size)
        if following is not None:
            segment, size = following
    return history


def highest_seq_id(directory: Path, newest: SegmentName | None = None) -> int | None:
    """Return the highest seq_id accepted by a possibly damaged journal, or None if its end cannot be read."""
    found = segments(directory)
    if not found or (newest is not None and newest > max(found)):
        return None
    highest, is_whole = 0, False
    for path in found.values():
        try:
            segment, size = _read(path)
        except JournalDamagedError:
            is_whole = False
            continue
        highest = max(highest, segment.last_seq_id)
        is_whole = segment.is_damaged or segment.good_bytes == size
    return highest if is_whole else None


def _name(path: Path) -> SegmentName:
    base, _, generation = path.name.removesuffix(".journal").partition("-")
    return SegmentName(int(base), int(generation))


def _read(path: Path) -> tuple[Segment, int]:
    """Return the decoded segment and the size of its file."""
    data = read_file(path)
    try:
        return decode_segment(data), len(data)
    except msgspec.MsgspecError as error:
        raise JournalDamagedError(f"{path.name} cannot be decoded: {error}") from error
    except JournalDamagedError as error:
        raise JournalDamagedError(f"{path.name}: {error}") from error


def _up_to_successor(name: SegmentName, path: Path, segment: Segment, size: int, successor: Segment) -> Segment:
    """Return the part of a segment that its successor declares valid, marked as damaged if it is incomplete."""
    if successor.header.previous != name:
        raise JournalDamagedError(f"{name} continues another segment than the one before it")
    limit = successor.header.previous_bytes
    part = segment if limit == size else decode_segment(read_file(path)[:limit])
    part.is_damaged |= part.good_bytes != limit
    return part
