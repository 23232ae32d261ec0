"""Expiry times of checkpoints, each in a file beside its checkpoint, so that the checkpoint's own files never change.

`.expires-<name>` holds a JSON object: SHA-256 of a manifest.json -> time at which the checkpoint with this manifest
expires. The time of a checkpoint that is about to replace another therefore applies to it alone, whether or not the
replacement succeeds.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from paceline import errors, layout
from paceline.files.regular_files import read_file
from paceline.log import get_logger
from paceline.steady_clock import SteadyClock

_log = get_logger(__name__)

_MAX_SECONDS = 100 * 365 * 86_400


def check_ttl(seconds: int | None) -> None:
    """Check how long a checkpoint is to live; None means for ever. Raises OutOfRange."""
    if seconds is not None and not 0 < seconds <= _MAX_SECONDS:
        raise errors.OutOfRange("must be 1 second to 100 years; leave it unset for never", field="ttl_seconds")


class Expiry(msgspec.Struct, frozen=True):
    """When a checkpoint expires. Both must be over, so that no jump of the wall clock deletes a checkpoint early."""

    moment: datetime
    """By the wall clock of when it was set; what people are told."""
    steady: float
    """By the trainer's steady clock."""

    @classmethod
    def after(cls, clock: SteadyClock, seconds: int) -> Expiry:
        """Return the expiry that is this many seconds from now."""
        moment = datetime.fromtimestamp(clock.wall(), UTC) + timedelta(seconds=seconds)
        return cls(moment, clock.now() + seconds)

    def is_over(self, clock: SteadyClock) -> bool:
        """Return whether the checkpoint has expired."""
        return self.moment.timestamp() <= clock.wall() and self.steady <= clock.now()


def read(directory: Path, digest: str) -> Expiry | None:
    """Return when the checkpoint in `directory`, whose manifest has this digest, expires; None means never."""
    return _read(directory).get(digest)


def write(directory: Path, digest: str, moment: Expiry | None, present: str | None = None) -> None:
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


def _read(directory: Path) -> dict[str, Expiry]:
    try:
        text = read_file(_file(directory))
    except FileNotFoundError:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Expiry])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # A damaged expiry file must not cause an intact checkpoint to be deleted.
        _log.warning("expiry file damaged; the checkpoint is kept", file=str(_file(directory)), error=str(error))
        return {}


def _file(directory: Path) -> Path:
    return directory.parent / f".expires-{directory.name}"
