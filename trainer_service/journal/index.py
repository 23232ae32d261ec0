"""What must be known of a journal without reading it, in a file beside its directory: journal.json.

It names the newest segment, so that a missing one is missed, and reserves seq_ids ahead, so that none that may have
been accepted is ever taken again where the journal is gone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline import layout
from paceline.log import get_logger
from trainer_service.journal.frames import SegmentName
from trainer_service.volume.checked_file import DamagedFileError, read_checked, write_checked

RESERVED = 1024
"""seq_ids that one write reserves."""

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
    """Return the index's file of a journal's directory."""
    return directory.with_suffix(".json")


def read_index(directory: Path) -> Index | None:
    """Read a journal's index; None where there is none, as in format 1, or where it is damaged and was set aside.

    Raises UnknownFormatError.
    """
    path = index_path(directory)
    if not path.exists():
        return None
    try:
        return read_checked(path, Index)
    except DamagedFileError as error:
        aside = layout.set_aside(path)
        _log.error("journal's index damaged and set aside", path=str(path), aside=aside.name, error=str(error))
        return None


def write_index(directory: Path, newest: SegmentName, limit: int) -> None:
    """Write a journal's index, durably. Raises DiskFull."""
    write_checked(index_path(directory), Index(newest.base, newest.generation, limit))
