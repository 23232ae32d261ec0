"""A journal's segments as bytes, format 2.

A segment is a header and frames, each at a multiple of 64 bytes. A frame is what one write appended: a seal, then
records. The header has a random key, and says which segment came before and how many of its bytes are good. The seal
has the payload's length and CRC-32C, the highest seq_id accepted so far, and `durable`: how many bytes of the segment
were known to be on the disk before this frame was written. BLAKE2b with the segment's key, over all of this and the
frame's own place, makes it certain that it was written here, by this service.

What follows from it when a frame is not whole:

- Of a segment that has a successor the good bytes are known: a bad frame among them is damage, others do not count.
- Of the newest, a bad frame is damage when any later seal says that its bytes were durable. Otherwise it is the torn
  end of what a crash interrupted, whole frames behind it or not, since pages reach the disk in any order: nobody was
  told of any of them.
- A later seal is looked for at multiples of 64 bytes, right through what clients sent. Who can read nothing of the
  volume cannot make one: that takes the key. Blocks with headers at fixed places, as LevelDB and RocksDB have them,
  also keep payloads from being taken for headers, but cannot tell a damaged record from a torn one within a block.

The one thing that cannot be told apart is damage to the last frame of all: it looks like one that was never synced.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, field

import google_crc32c

from trainer_service.journal import format1
from trainer_service.journal.records import JournalDamagedError, Record, decode_records
from trainer_service.volume.checked_file import UnknownFormatError

UNIT = 64
"""Headers and frames begin at multiples of this many bytes."""
_FAMILY, _MAGIC = b"PACEJNL", b"PACEJNL2"
_HEADER = struct.Struct("<8s16sQQIQ")
_SEAL = struct.Struct("<4sIIQQ")
_MARK = b"\xa7PJF"
_TAG_BYTES = 16


@dataclass(frozen=True, order=True, slots=True)
class SegmentName:
    """Names a segment. One of the same base and a higher generation goes on where the other was given up."""

    base: int
    """seq_id of the first command that it can hold."""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment's header says."""

    key: bytes
    previous: SegmentName | None
    """The segment before it; None for the first of a journal."""
    previous_bytes: int
    """Bytes of that segment that count."""

    @classmethod
    def new(cls, previous: SegmentName | None, previous_bytes: int) -> Header:
        """Make one with a key of its own."""
        return cls(os.urandom(16), previous, previous_bytes)

    def encode(self) -> bytes:
        """Return its bytes, UNIT of them."""
        before = self.previous or SegmentName(0)
        packed = _HEADER.pack(_MAGIC, self.key, before.base, before.generation, 0, self.previous_bytes)
        return packed.ljust(UNIT - 4, b"\0") + _crc(packed).to_bytes(4, "little")


@dataclass(slots=True)
class Segment:
    """What was read of a segment."""

    format: int
    header: Header | None
    """None in format 1."""
    records: list[Record] = field(default_factory=list)
    good_bytes: int = 0
    """Length of what is whole, from the start."""
    is_damaged: bool = False
    """Whether bytes that were once durable are not what they were."""
    last_seq_id: int = 0
    """Highest seq_id that any readable part of it knows to be accepted."""


def encode_frame(header: Header, offset: int, durable: int, last_seq_id: int, payload: bytes) -> bytes:
    """Return the frame that stands at `offset` and holds `payload`, encoded records."""
    fields = _SEAL.pack(_MARK, len(payload), _crc(payload), durable, last_seq_id)
    frame = fields + _tag(header.key, offset, fields) + payload
    return frame.ljust(-(-len(frame) // UNIT) * UNIT, b"\0")


def decode_segment(data: bytes) -> Segment:
    """Read a segment, up to where `data` ends.

    Raises JournalDamagedError when nothing of it can be read, UnknownFormatError.
    """
    if data[: len(format1.MAGIC)] == format1.MAGIC or len(data) < len(_MAGIC):
        found = format1.decode(data)
        last = max((record.seq_id for record in found.records), default=0)
        return Segment(1, None, found.records, found.good_bytes, found.is_damaged, last)
    check_magic(data, "a journal")
    header = _decode_header(data)
    segment = Segment(2, header)
    _take_frames(segment, header.key, data)
    return segment


def check_magic(data: bytes, name: str) -> None:
    """Check that what begins with `data` is of a known format, or of none. Raises UnknownFormatError."""
    if data[: len(_FAMILY)] == _FAMILY and data[: len(_MAGIC)] not in {_MAGIC, format1.MAGIC, _FAMILY}:
        raise UnknownFormatError(f"{name} is of format {data[len(_FAMILY) : len(_MAGIC)].decode(errors='replace')!r}")


def _decode_header(data: bytes) -> Header:
    packed = data[: _HEADER.size]
    if len(data) < UNIT or _crc(packed) != int.from_bytes(data[UNIT - 4 : UNIT], "little"):
        raise JournalDamagedError("the header is damaged")
    _, key, base, generation, _, previous_bytes = _HEADER.unpack(packed)
    return Header(key, SegmentName(base, generation) if base else None, previous_bytes)


@dataclass(frozen=True, slots=True)
class _Seal:
    length: int
    checksum: int
    durable: int
    last_seq_id: int


def _take_frames(segment: Segment, key: bytes, data: bytes) -> None:
    """Read frames up to the first that is not whole; of what follows only what the seals say."""
    offset, first_bad = UNIT, len(data)
    while offset < len(data):
        seal = _seal_at(key, data, offset)
        if seal is None:
            first_bad, offset = min(first_bad, offset), offset + UNIT
            continue
        segment.last_seq_id = max(segment.last_seq_id, seal.last_seq_id)
        segment.is_damaged |= seal.durable > first_bad
        start = offset + _SEAL.size + _TAG_BYTES
        payload = data[start : start + seal.length]
        end = -(-(start + seal.length) // UNIT) * UNIT
        is_whole = end <= len(data) and _crc(payload) == seal.checksum
        if not is_whole:
            first_bad = min(first_bad, offset)
        elif first_bad == len(data):
            segment.records += decode_records(payload)
        offset = end
    segment.good_bytes = min(first_bad, offset)


def _seal_at(key: bytes, data: bytes, offset: int) -> _Seal | None:
    if data[offset : offset + len(_MARK)] != _MARK:
        return None
    end = offset + _SEAL.size
    fields = data[offset:end]
    if data[end : end + _TAG_BYTES] != _tag(key, offset, fields):
        return None
    _, length, checksum, durable, last_seq_id = _SEAL.unpack(fields)
    return _Seal(length, checksum, durable, last_seq_id)


def _tag(key: bytes, offset: int, fields: bytes) -> bytes:
    return hashlib.blake2b(offset.to_bytes(8, "little") + fields, key=key, digest_size=_TAG_BYTES).digest()


def _crc(data: bytes) -> int:
    return int(google_crc32c.value(data))
