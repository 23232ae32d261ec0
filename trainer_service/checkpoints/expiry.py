"""Expiry times of checkpoints, each in a file beside its checkpoint, so that the checkpoint's own files never change.

`.expires-<name>` holds a JSON object: SHA-256 of a manifest.json -> time at which the checkpoint with this manifest
expires. The time of a checkpoint that is about to replace another therefore applies to it alone, whether or not the
replacement succeeds. A file that holds only a time applies to any checkpoint of that name.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from paceline import layout
from paceline.log import get_logger

_ANY = ""
"""Key that matches the manifest of any checkpoint of the name."""
_log = get_logger(__name__)


def read(directory: Path, digest: str) -> datetime | None:
    """Return when the checkpoint in `directory`, whose manifest has this digest, expires; None means never."""
    moments = _read(directory)
    return moments.get(digest, moments.get(_ANY))


def write(directory: Path, digest: str, moment: datetime | None, present: str | None = None) -> None:
    """Durably set when the checkpoint whose manifest has this digest expires; None means never.

    `present` is the digest of another checkpoint that has the name so far; its expiry does not change. Raises DiskFull.
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
    """Remove the expiry file of a deleted checkpoint."""
    _file(directory).unlink(missing_ok=True)


def is_known(directory: Path) -> bool:
    """Return whether an expiry time was set for a checkpoint of this name."""
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
        # A damaged expiry file must not cause an intact checkpoint to be deleted.
        _log.warning("expiry file damaged; the checkpoint is kept", file=str(_file(directory)), error=str(error))
        return {}


def _file(directory: Path) -> Path:
    return directory.parent / f".expires-{directory.name}"
