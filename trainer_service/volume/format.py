"""Which format the volume has: read before anything on it is touched."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline import layout
from paceline.log import get_logger
from trainer_service.volume.checked_file import FORMAT, DamagedFileError, format_of, read_checked, write_checked

_FILE = "volume.json"
_log = get_logger(__name__)


class _Volume(msgspec.Struct, frozen=True):
    """The content of volume.json: its format says it all."""


def check_volume(root: Path) -> None:
    """Refuse a volume of a format that this service does not know, and change nothing. Raises SystemExit."""
    path = root / _FILE
    try:
        found = format_of(path.read_bytes(), _FILE) if path.exists() else FORMAT
    except DamagedFileError:
        return  # Each run's files say their own format.
    if found > FORMAT:
        raise SystemExit(
            f"the volume {root} has format {found} and this trainer knows up to {FORMAT}; nothing was changed: "
            "serve it with the version that wrote it, or a newer one"
        )


def is_current(root: Path) -> bool:
    """Whether the volume says that it has this service's format."""
    path = root / _FILE
    try:
        return path.exists() and read_checked(path, _Volume) is not None
    except DamagedFileError as error:
        _log.error("the volume's file is damaged and set aside", aside=layout.set_aside(path).name, error=str(error))
        return False


def write_volume_format(root: Path) -> None:
    """Say that the volume has this service's format. Raises DiskFull."""
    write_checked(root / _FILE, _Volume())
