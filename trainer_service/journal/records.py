"""What a journal holds, and its bytes.

A segment is the magic and records. A record is a mark, its payload's length (u32, little-endian), the CRC-32C of length
and payload (u32), and the payload in msgpack. The mark lets a reader find whole records behind damaged bytes, and so
tell damage from the torn end of the newest segment, of which nobody was told.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c
import msgspec

from trainer_service.engine.wire import Failure

MAGIC = b"PACEJNL1"

_MARK = b"\xa7PJR"
_HEADER = struct.Struct("<4sII")


class Facts(msgspec.Struct, frozen=True):
    """What the service knows of a run.

    With an answer in the journal, `step` and `next_version` are those after the command in the run's order; the others
    are those of the moment when the answer was written, which no earlier record knows better.
    """

    step: int = 0
    latest_version: int = 0
    next_version: int = 1
    latest_state_checkpoint: str = ""

    def at(self, place: Facts | None) -> Facts:
        """Return these facts, with what held at a place in the run's order where that is given."""
        if place is None:
            return self
        return msgspec.structs.replace(self, step=place.step, next_version=place.next_version)


class CommandRecord(msgspec.Struct, frozen=True, tag="command"):
    """A command that was accepted; written before it is executed."""

    seq_id: int
    method: str
    tenant: str
    request: bytes


class AnswerRecord(msgspec.Struct, frozen=True, tag="answer"):
    """What a command answered; written before the client hears of it."""

    seq_id: int
    digest: bytes
    method: str
    reply: bytes | None
    """None for a refusal, and for a reply that is no longer kept."""
    failure: Failure | None = None
    facts: Facts = Facts()
    version: int = 0
    """Number of the version that the command made, also where it was refused since nobody acknowledged it; 0: none."""


class AttemptRecord(msgspec.Struct, frozen=True, tag="attempt"):
    """The engine died while it executed the command."""

    seq_id: int


class RebaseRecord(msgspec.Struct, frozen=True, tag="rebase"):
    """The run's state was lost; commands below `seq_id` that stand nowhere are given up."""

    seq_id: int


Record = CommandRecord | AnswerRecord | AttemptRecord | RebaseRecord

_decoder = msgspec.msgpack.Decoder(Record)


class JournalDamagedError(Exception):
    """A journal or snapshot holds bytes that differ from their checksum, or lacks some."""


def encode(record: Record) -> bytes:
    """Return a record's bytes."""
    payload = msgspec.msgpack.encode(record)
    length = len(payload).to_bytes(4, "little")
    checksum = google_crc32c.extend(google_crc32c.value(length), payload)
    return _MARK + length + int(checksum).to_bytes(4, "little") + payload


@dataclass(frozen=True, slots=True)
class Segment:
    """What was read of one segment."""

    records: list[Record]
    good_bytes: int
    """Length of the part before a torn end."""
    is_damaged: bool
    """Whether whole records follow bytes that are none: those before them were once good too."""


def decode(data: bytes) -> Segment:
    """Read a segment's bytes."""
    if data[: len(MAGIC)] != MAGIC:
        return Segment([], 0, is_damaged=len(data) > len(MAGIC))
    records, offset = [], len(MAGIC)
    while payload := _payload_at(data, offset):
        records.append(_decoder.decode(payload))
        offset += _HEADER.size + len(payload)
    after = [found for start in _marks(data, offset + 1) if (found := _payload_at(data, start))]
    return Segment([*records, *map(_decoder.decode, after)], offset, is_damaged=bool(after))


def _marks(data: bytes, start: int) -> Iterator[int]:
    while (start := data.find(_MARK, start)) >= 0:
        yield start
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
