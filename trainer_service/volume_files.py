"""JSON files of the checkpoint volume, which contain their format number and a checksum of their content.

volume.json at the volume's root declares the format of everything else; it is checked before anything is touched. A
run's file, run.json, has a copy beside it, so that damage to one of them loses nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import msgspec

from paceline import errors, layout
from paceline.files.regular_files import NotRegularFile, read_file
from paceline.layout import DELETED_FILE, RUN_FILE
from paceline.log import get_logger

COPY_FILE = "run.copy.json"
_VOLUME_FILE = "volume.json"
_FORMAT = 1
"""Format of everything that the trainer writes to the volume."""

T = TypeVar("T")

_log = get_logger(__name__)


class UnknownFormatError(Exception):
    """A file was written by another version of this service, or by something else. It must not be changed."""


class DamagedFileError(Exception):
    """A file cannot be decoded or does not match its checksum."""


class _File(msgspec.Struct, frozen=True):
    format: int
    crc32c: int
    content: msgspec.Raw


class _Format(msgspec.Struct, frozen=True):
    format: int


class _VolumeContent(msgspec.Struct, frozen=True):
    """The content of volume.json, which is empty: only the file's format matters."""


def write_checked(path: Path, content: Any) -> None:
    """Write a file durably and atomically. Raises DiskFull."""
    raw = msgspec.json.encode(content)
    file = _File(_FORMAT, int(google_crc32c.value(raw)), msgspec.Raw(raw))
    layout.write_file(path, msgspec.json.encode(file) + b"\n")


def decode_checked(text: bytes, kind: type[T], name: str) -> T:
    """Decode and verify a file's bytes. Raises DamagedFileError, UnknownFormatError."""
    found = _format_of(text, name)
    if found != _FORMAT:
        raise UnknownFormatError(f"{name} has unknown format {found}")
    try:
        file = msgspec.json.decode(text, type=_File)
        if google_crc32c.value(bytes(file.content)) != file.crc32c:
            raise DamagedFileError(f"{name} differs from its checksum")
        return msgspec.json.decode(file.content, type=kind)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{name} cannot be read: {error}") from error


def read_own(path: Path) -> bytes:
    """Return the content of one of the volume's own files. Raises DamagedFileError for a link, OSError."""
    try:
        return read_file(path)
    except NotRegularFile as error:
        raise DamagedFileError(f"{path.name} {error.message}") from error


def _format_of(text: bytes, name: str) -> int:
    """Return the format that a file declares. Raises DamagedFileError if it declares none."""
    try:
        return msgspec.json.decode(text, type=_Format).format
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{name} cannot be read: {error}") from error


def check_volume(root: Path) -> None:
    """Raise SystemExit if the volume has another format than this service's; change nothing."""
    path = root / _VOLUME_FILE
    try:
        found = _format_of(read_own(path), _VOLUME_FILE) if path.exists() else _FORMAT
    except DamagedFileError:
        return  # each run's files declare their own format
    if found != _FORMAT:
        raise SystemExit(
            f"the volume {root} has format {found} and this trainer reads format {_FORMAT}; nothing was changed: "
            "serve it with the version that wrote it"
        )


def declare_format(root: Path) -> None:
    """Write volume.json, unless the volume has an intact one; a damaged one is set aside. Raises DiskFull."""
    path = root / _VOLUME_FILE
    if path.exists():
        try:
            decode_checked(read_own(path), _VolumeContent, _VOLUME_FILE)
        except DamagedFileError as error:
            aside = layout.quarantine(path).name
            _log.error("the volume's file is damaged and set aside", aside=aside, error=str(error))
        else:
            return
    write_checked(path, _VolumeContent())


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
            content = decode_checked(read_own(path), dict[str, Any], path.name)
        except DamagedFileError as error:
            _log.error("run's file damaged", path=str(path), error=str(error))
            damaged.append(path)
            continue
        for other in damaged:
            layout.quarantine(other)
        if path.name != RUN_FILE:
            _rewrite(folder, content)
        return content
    raise DamagedFileError(f"{RUN_FILE} and its copy are damaged")


def _rewrite(folder: Path, content: dict[str, Any]) -> None:
    try:
        write_run_file(folder, content)
    except errors.DiskFull as error:
        _log.warning("run's file not rewritten; the next startup does it", folder=str(folder), error=error.message)


def tenant_of(folder: Path) -> str | None:
    """Return the tenant that owns or owned a run, or None if no file of the run names it. Changes nothing."""
    for name in (RUN_FILE, COPY_FILE, DELETED_FILE):
        try:
            return str(decode_checked(read_own(folder / name), dict[str, Any], name)["tenant"])
        except (OSError, DamagedFileError, UnknownFormatError, KeyError):
            continue  # the next file may name it
    return None


def write_run_file(folder: Path, content: dict[str, Any]) -> None:
    """Write a run's file and its copy durably. Raises DiskFull."""
    write_checked(folder / COPY_FILE, content)
    write_checked(folder / RUN_FILE, content)
