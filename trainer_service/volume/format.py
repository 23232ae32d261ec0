"""The format of the volume, which is checked before anything on it is touched."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline import layout
from paceline.log import get_logger
from trainer_service.volume.checked_file import FORMAT, DamagedFileError, format_of, read_checked, write_checked

_FILE = "volume.json"
_log = get_logger(__name__)


class _Volume(msgspec.Struct, frozen=True):
    """The content of volume.json, which is empty: only the file's format matters."""


def check_volume(root: Path) -> None:
    """Raise SystemExit if the volume has a newer format than this service knows; change nothing."""
    path = root / _FILE
    try:
        found = format_of(path.read_bytes(), _FILE) if path.exists() else FORMAT
    except DamagedFileError:
        return  # each run's files declare their own format
    if found > FORMAT:
        raise SystemExit(
            f"the volume {root} has format {found} and this trainer knows up to {FORMAT}; nothing was changed: "
            "serve it with the version that wrote it, or a newer one"
        )


def is_current(root: Path) -> bool:
    """Return whether the volume declares this service's format."""
    path = root / _FILE
    try:
        return path.exists() and read_checked(path, _Volume) is not None
    except DamagedFileError as error:
        _log.error("the volume's file is damaged and set aside", aside=layout.quarantine(path).name, error=str(error))
        return False


def write_volume_format(root: Path) -> None:
    """Declare that the volume has this service's format. Raises DiskFull."""
    write_checked(root / _FILE, _Volume())
