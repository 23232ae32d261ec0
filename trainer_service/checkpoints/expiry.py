"""When checkpoints expire: a file beside each that does, so that its own files never change.

`.expires-<name>` holds JSON: the SHA-256 of a manifest.json -> the moment at which the checkpoint with this manifest
expires. So the time of a checkpoint that is about to take another's name holds for it alone, whether it gets there or
not. A file that holds nothing but a moment means whatever has the name.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from paceline import layout
from paceline.log import get_logger

_ANY = ""
"""Stands for the manifest of whatever has the name."""
_log = get_logger(__name__)


def read(directory: Path, digest: str) -> datetime | None:
    """Return when the checkpoint `directory`, whose manifest has this digest, expires; None means never."""
    moments = _read(directory)
    return moments.get(digest, moments.get(_ANY))


def write(directory: Path, digest: str, moment: datetime | None, present: str | None = None) -> None:
    """Say when a checkpoint with this manifest expires, durably; None means never.

    `present` is the digest of another that has its name now: for that one nothing changes. Raises DiskFull.
    """
    file, moments = _file(directory), {}
    if present is not None and (known := read(directory, present)) is not None:
        moments[present] = known
    if moment is not None:
        moments[digest] = moment
    if moments:
        layout.write_file(file, msgspec.json.encode(moments))
    elif file.exists():
        file.unlink()
        layout.sync_directory(file.parent)


def forget(directory: Path) -> None:
    """Drop what is known of a checkpoint that is gone."""
    _file(directory).unlink(missing_ok=True)


def is_known(directory: Path) -> bool:
    """Whether a time was set for a checkpoint of this name."""
    return _file(directory).exists()


def _read(directory: Path) -> dict[str, datetime]:
    try:
        text = _file(directory).read_bytes()
    except FileNotFoundError:
        return {}
    try:
        if not text.startswith(b"{"):
            return {_ANY: datetime.fromisoformat(text.decode())}
        return msgspec.json.decode(text, type=dict[str, datetime])
    except (msgspec.MsgspecError, ValueError) as error:
        # What is intact is not deleted because something else is damaged.
        _log.warning("a checkpoint's time to live is damaged; it is kept", file=str(_file(directory)), error=str(error))
        return {}


def _file(directory: Path) -> Path:
    return directory.parent / f".expires-{directory.name}"
