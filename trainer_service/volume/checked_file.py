"""Small JSON files that contain their format number and a checksum of their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import msgspec

from paceline import layout

FORMAT = 2
"""Format of everything that the trainer writes to the volume."""

T = TypeVar("T")


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


def write_checked(path: Path, content: Any) -> None:
    """Write a file durably and atomically. Raises DiskFull."""
    layout.write_file(path, encode_checked(content))


def encode_checked(content: Any) -> bytes:
    """Encode content with its format and checksum."""
    raw = msgspec.json.encode(content)
    file = _File(FORMAT, int(google_crc32c.value(raw)), msgspec.Raw(raw))
    return msgspec.json.encode(file) + b"\n"


def read_checked(path: Path, kind: type[T]) -> T:
    """Read and verify a file's content. Raises DamagedFileError, UnknownFormatError, FileNotFoundError."""
    return decode_checked(path.read_bytes(), kind, path.name)


def decode_checked(text: bytes, kind: type[T], name: str) -> T:
    """Decode and verify a file's bytes. Raises DamagedFileError, UnknownFormatError."""
    found = format_of(text, name)
    if found != FORMAT:
        raise UnknownFormatError(f"{name} is of format {found}")
    try:
        file = msgspec.json.decode(text, type=_File)
        if google_crc32c.value(bytes(file.content)) != file.crc32c:
            raise DamagedFileError(f"{name} differs from its checksum")
        return msgspec.json.decode(file.content, type=kind)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{name} cannot be read: {error}") from error


def format_of(text: bytes, name: str) -> int:
    """Return the format that a file declares. Raises DamagedFileError if it declares none."""
    try:
        return msgspec.json.decode(text, type=_Format).format
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{name} cannot be read: {error}") from error
