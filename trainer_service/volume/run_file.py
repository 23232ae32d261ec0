"""A run's file, run.json, with a copy beside it, so that damage to one of them loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline import errors, layout
from paceline.layout import DELETED_FILE, RUN_FILE
from paceline.log import get_logger
from trainer_service.volume.checked_file import (
    DamagedFileError,
    UnknownFormatError,
    decode_checked,
    format_of,
    write_checked,
)

COPY_FILE = "run.copy.json"

_log = get_logger(__name__)


def decode_run_file(text: bytes, name: str = RUN_FILE) -> dict[str, Any]:
    """Decode a run's file; format 1 has no checksum. Raises DamagedFileError, UnknownFormatError."""
    if format_of(text, name) != 1:
        return decode_checked(text, dict[str, Any], name)
    facts: dict[str, Any] = json.loads(text)
    del facts["format"]
    return facts


def read_run_file(folder: Path) -> dict[str, Any]:
    """Read a run's file. If it is damaged, set it aside and write it again from the copy.

    Raises DamagedFileError if both are damaged, UnknownFormatError, FileNotFoundError if neither exists.
    """
    paths = [path for path in (folder / RUN_FILE, folder / COPY_FILE) if path.exists()]
    if not paths:
        raise FileNotFoundError(folder / RUN_FILE)
    damaged: list[Path] = []
    for path in paths:
        try:
            facts = decode_run_file(path.read_bytes(), path.name)
        except DamagedFileError as error:
            _log.error("run's file damaged", path=str(path), error=str(error))
            damaged.append(path)
            continue
        for other in damaged:
            layout.quarantine(other)
        if path.name != RUN_FILE:
            _write_again(folder, facts)
        return facts
    raise DamagedFileError(f"{RUN_FILE} and its copy are damaged")


def _write_again(folder: Path, facts: dict[str, Any]) -> None:
    try:
        write_run_file(folder, facts)
    except errors.DiskFull as error:
        _log.warning("run's file not written again; the next start does", folder=str(folder), error=error.message)


def tenant_of(folder: Path) -> str | None:
    """Return the tenant that owns or owned a run, or None if no file of the run names it. Changes nothing."""
    for name in (RUN_FILE, COPY_FILE, DELETED_FILE):
        try:
            return str(decode_run_file((folder / name).read_bytes(), name)["tenant"])
        except (OSError, DamagedFileError, UnknownFormatError, KeyError):
            continue  # the next file may name it
    return None


def write_run_file(folder: Path, facts: dict[str, Any]) -> None:
    """Write a run's file and its copy durably. Raises DiskFull."""
    write_checked(folder / COPY_FILE, facts)
    write_checked(folder / RUN_FILE, facts)
