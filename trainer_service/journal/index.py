"""The index of a journal, journal.json beside its directory: what must be known even if the journal cannot be read.

It names the newest segment, so that its loss is detected, and reserves seq_ids ahead, so that a seq_id that may have
been accepted is never accepted again after the journal was lost.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline import layout
from paceline.log import get_logger
from trainer_service.journal.frames import SegmentName
from trainer_service.volume.checked_file import DamagedFileError, read_checked, write_checked

RESERVED = 1024
"""Number of seq_ids that one write reserves."""

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
    """Read a journal's index. Return None if there is none, as in format 1, or if it was damaged and set aside.

    Raises UnknownFormatError.
    """
    path = index_path(directory)
    if not path.exists():
        return None
    try:
        return read_checked(path, Index)
    except DamagedFileError as error:
        aside = layout.quarantine(path)
        _log.error("journal's index damaged and set aside", path=str(path), aside=aside.name, error=str(error))
        return None


def write_index(directory: Path, newest: SegmentName, limit: int) -> None:
    """Write a journal's index durably. Raises DiskFull."""
    write_checked(index_path(directory), Index(newest.base, newest.generation, limit))
