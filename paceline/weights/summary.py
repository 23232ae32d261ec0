"""The fields of a manifest that listings and owner checks need, read without its tensors."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import msgspec

from paceline import errors
from paceline.files.regular_files import read_file
from paceline.layout import MANIFEST_FILE


class _Model(msgspec.Struct, frozen=True):
    blake3: str = ""


class _Manifest(msgspec.Struct, frozen=True, rename="camel"):
    model: _Model
    create_time: datetime
    tenant: str = ""
    step: int = 0
    seq_id: int = 0
    sha256: str = ""


class Summary(msgspec.Struct, frozen=True):
    """A manifest's fields, without its tensors."""

    blake3: str
    """BLAKE3-256 of the weights."""
    sha256: str
    """Their SHA-256; empty for a published version."""
    tenant: str
    step: int
    seq_id: int
    """seq_id of the command that created the weights."""
    create_time: datetime
    digest: str
    """SHA-256 of the manifest itself, which distinguishes one save from the next under the same name."""


def summarize(directory: Path) -> Summary:
    """Read these fields of a directory's manifest. Raises FileNotFoundError, ChecksumMismatch if it is damaged."""
    text = read_file(directory / MANIFEST_FILE)
    try:
        read = msgspec.json.decode(text, type=_Manifest, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.ChecksumMismatch("the manifest is damaged; restore the directory from a backup") from error
    return Summary(
        blake3=read.model.blake3,
        sha256=read.sha256,
        tenant=read.tenant,
        step=read.step,
        seq_id=read.seq_id,
        create_time=read.create_time.astimezone(UTC),
        digest=sha256(text).hexdigest(),
    )
