"""Reading a run's journal back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from trainer_service.journal.records import (
    MAGIC,
    AnswerRecord,
    AttemptRecord,
    CommandRecord,
    JournalDamagedError,
    RebaseRecord,
    Segment,
    decode,
)

_SUFFIX = ".journal"


@dataclass(slots=True)
class History:
    """What a journal says of a run."""

    base: int
    """seq_id of the first command that it can hold."""
    commands: dict[int, CommandRecord] = field(default_factory=dict)
    """By seq_id, in order."""
    answers: dict[int, AnswerRecord] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    """How often the engine died of a command."""
    rebased: int = 0
    """Where the run went on after its state was lost; 0 where that never happened."""

    @property
    def last_seq_id(self) -> int:
        """Highest seq_id that was accepted."""
        return next(reversed(self.commands), self.base - 1)

    def add(self, segment: Segment) -> None:
        """Take in a segment's records. Raises JournalDamagedError when one is missing."""
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
                case RebaseRecord():
                    self.base, self.rebased = record.seq_id, record.seq_id
                    self.commands.clear()


def segment_path(directory: Path, base: int) -> Path:
    """Return the file of the segment that begins with command `base`."""
    return directory / f"{base:020d}{_SUFFIX}"


def segments(directory: Path) -> dict[int, Path]:
    """Return the segments of a journal by their first seq_id, oldest first."""
    return {int(path.name.removesuffix(_SUFFIX)): path for path in sorted(directory.glob(f"[0-9]*{_SUFFIX}"))}


def read_history(directory: Path) -> History:
    """Read a journal. Raises JournalDamagedError; a torn end is left out."""
    found = segments(directory)
    if not found:
        raise JournalDamagedError("the journal is gone")
    history = History(min(found))
    for base, path in found.items():
        data = path.read_bytes()
        segment = decode(data)
        if segment.is_damaged or (base != max(found) and segment.good_bytes != len(data)):
            raise JournalDamagedError(f"{path.name} is damaged after {segment.good_bytes} bytes")
        history.add(segment)
    return history


def highest_seq_id(directory: Path) -> int:
    """Return the highest seq_id that can still be read of a journal, damaged or not."""
    records = [record for path in segments(directory).values() for record in decode(path.read_bytes()).records]
    return max((record.seq_id for record in records), default=0)


def drop_torn_end(path: Path) -> int:
    """Cut a segment after its last whole record; return its length. Makes the segment where there is none."""
    good = decode(path.read_bytes()).good_bytes if path.exists() else 0
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(good)
        if not good:
            file.write(MAGIC)
    return max(good, len(MAGIC))
