"""Reading the journals and snapshots of format 1, so that a volume of that time serves on. Nothing writes them.

A segment was the magic and records: a mark, the payload's length (u32, little-endian), the CRC-32C of both (u32), and
the payload in msgpack.
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
    """What was read of one segment."""

    records: list[Record]
    good_bytes: int
    is_damaged: bool
    """Whether whole records follow bytes that are none."""


def decode(data: bytes) -> Segment:
    """Read a segment's bytes."""
    if data[: len(MAGIC)] != MAGIC:
        return Segment([], 0, is_damaged=len(data) > len(MAGIC))
    records, offset = [], len(MAGIC)
    while payload := _payload_at(data, offset):
        records.append(decode_record(payload))
        offset += _HEADER.size + len(payload)
    after = list(_records_behind(data, offset + 1))
    return Segment([*records, *after], offset, is_damaged=bool(after))


def _records_behind(data: bytes, start: int) -> Iterator[Record]:
    """Find records from `start` on. A client may have sent bytes like theirs, so they only mean that care is due."""
    while (start := data.find(_MARK, start)) >= 0:
        try:
            if payload := _payload_at(data, start):
                yield decode_record(payload)
        except msgspec.MsgspecError:
            pass  # Bytes that a client sent: no record of this service is like that.
        start += 1


def _payload_at(data: bytes, offset: int) -> bytes:
    """Return the payload of the record at `offset`; nothing where there is none."""
    start = offset + _HEADER.size
    if start >= len(data):
        return b""
    mark, length, checksum = _HEADER.unpack_from(data, offset)
    if mark != _MARK or not 0 < length <= len(data) - start:
        return b""
    payload = data[start : start + length]
    prefix = google_crc32c.value(length.to_bytes(4, "little"))
    return payload if google_crc32c.extend(prefix, payload) == checksum else b""
