"""Read journals and snapshots of format 1, so that old volumes keep working. Nothing writes this format.

A segment is the magic followed by records. A record is a mark, the payload's length (u32, little-endian), the CRC-32C
of length and payload (u32), and the payload in msgpack.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c
import msgspec

from trainer_service.journal.records import Record, decode_record

MAGIC = b"PACEJNL1"
_MARK = b"\xa7PJR"
_HEADER = struct.Struct("<4sII")


@dataclass(frozen=True, slots=True)
class Segment:
    """The decoded content of a segment."""

    records: list[Record]
    good_bytes: int
    is_damaged: bool
    """Whether complete records follow bytes that are not a record."""


def decode(data: bytes) -> Segment:
    """Decode a segment."""
    if data[: len(MAGIC)] != MAGIC:
        return Segment([], 0, is_damaged=len(data) > len(MAGIC))
    records, offset = [], len(MAGIC)
    while payload := _payload_at(data, offset):
        records.append(decode_record(payload))
        offset += _HEADER.size + len(payload)
    after = list(_records_behind(data, offset + 1))
    return Segment([*records, *after], offset, is_damaged=bool(after))


def _records_behind(data: bytes, start: int) -> Iterator[Record]:
    """Yield records from `start` on. They suggest damage but do not prove it: a client may have sent such bytes."""
    while (start := data.find(_MARK, start)) >= 0:
        try:
            if payload := _payload_at(data, start):
                yield decode_record(payload)
        except msgspec.MsgspecError:
            pass  # bytes that a client sent: the service writes no such record
        start += 1


def _payload_at(data: bytes, offset: int) -> bytes:
    """Return the payload of the record at `offset`, or empty bytes if there is none."""
    start = offset + _HEADER.size
    if start >= len(data):
        return b""
    mark, length, checksum = _HEADER.unpack_from(data, offset)
    if mark != _MARK or not 0 < length <= len(data) - start:
        return b""
    payload = data[start : start + length]
    prefix = google_crc32c.value(length.to_bytes(4, "little"))
    return payload if google_crc32c.extend(prefix, payload) == checksum else b""
