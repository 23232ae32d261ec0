"""Byte format of journals: segments of frames, which hold records.

A record is msgpack, preceded by its length (u32, little-endian).

A segment is a header followed by frames, each aligned to 64 bytes. A frame holds what one write appended: a seal, then
records. The header contains a random key, the name of the previous segment, and the number of valid bytes in it. The
seal contains the payload's length and CRC-32C, the highest seq_id accepted so far, and `durable`: how many bytes of the
segment were known to be on disk before this frame was written. A BLAKE2b tag with the segment's key, over these fields
and the frame's offset, proves that this service wrote the frame at this place.

An incomplete frame is interpreted as follows:

- If the segment has a successor, its number of valid bytes is known. A bad frame within them is damage; later bytes are
  ignored.
- In the newest segment, a bad frame is damage if any later seal says that its bytes were durable. Otherwise it is the
  torn tail of writes that a crash interrupted, even if complete frames follow it, because pages reach the disk in any
  order. None of these frames had been acknowledged.
- Later seals are searched for at all multiples of 64 bytes, including inside the payloads that clients sent. Forging
  one takes the key, and therefore read access to the volume. Blocks with headers at fixed offsets, as in LevelDB and
  RocksDB, also keep payloads from being mistaken for headers, but cannot tell a damaged record from a torn one within a
  block.

One case is not detected: damage to the very last frame looks like a frame that was never synced.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import google_crc32c
import msgspec

from paceline.errors import CATALOG, Internal, PacelineError
from trainer_service.volume_files import UnknownFormatError

UNIT = 64
"""Headers and frames start at multiples of this many bytes."""
_FAMILY, _MAGIC = b"PACEJNL", b"PACEJNL1"
_HEADER = struct.Struct("<8s16sQQIQ")
_SEAL = struct.Struct("<4sIIQQ")
_MARK = b"\xa7PJF"
_TAG_BYTES = 16
_LENGTH_BYTES = 4


class Counters(msgspec.Struct, frozen=True):
    """What the service knows about a run.

    In a journaled answer, `latest_version` is the value when the answer was written; the last record has the newest.
    The others are the values after the command in the run's order.
    """

    step: int = 0
    latest_version: int = 0
    next_version: int = 1
    gradient_tokens: int = 0
    """Counted positions of the gradient that waits; 0 if none waits."""

    def at(self, place: Counters) -> Counters:
        """Return these counters with those of a place in the run's order that depend on it."""
        return msgspec.structs.replace(place, latest_version=self.latest_version)


class RecordedError(msgspec.Struct, frozen=True):
    """An error that a command answered."""

    reason: str
    message: str
    field: str
    metadata: dict[str, str]
    retry_after: float | None
    """In seconds; None if waiting is not enough."""

    @classmethod
    def of(cls, error: PacelineError) -> RecordedError:
        """Convert an error of the catalog."""
        return cls(error.reason, error.message, error.field, error.metadata, error.retry_after)

    def error(self) -> PacelineError:
        """Return the error; one whose reason this release does not know is Internal."""
        return CATALOG.get(self.reason, Internal)(
            self.message, field=self.field, metadata=self.metadata, retry_after=self.retry_after
        )


class CommandRecord(msgspec.Struct, frozen=True, tag="command", omit_defaults=True):
    """An accepted command; written before it is executed."""

    seq_id: int
    method: str
    tenant: str
    request: bytes
    """Without the attachment; empty if the command was refused."""
    refusal: RecordedError | None = None
    """What the command answers at its turn, if it was refused on arrival."""
    digest: bytes = b""
    """Digest of the original request, if it was refused."""
    attachment: int = 0
    """Number of the attached client that sent it; 0 if that client did not attach."""


class AnswerRecord(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to a command; written before the client receives it."""

    seq_id: int
    digest: bytes
    method: str
    reply: bytes | None
    """None for a refusal or a reply that is no longer kept."""
    failure: RecordedError | None = None
    counters: Counters = Counters()
    version: int = 0
    """Version that the command made, even if it was refused because nobody acknowledged the version; 0 for none."""
    version_blake3: str = ""
    """BLAKE3-256 of that version; empty if there is none."""
    attachment: int = 0
    """Number of the attached client that sent the command; 0 if that client did not attach."""


class AttemptRecord(msgspec.Struct, frozen=True, tag="attempt"):
    """The engine died while executing the command."""

    seq_id: int


class CancelRecord(msgspec.Struct, frozen=True, tag="cancel"):
    """The command was refused before it started, because another client attached; it answers so at its turn."""

    seq_id: int


class RebaseRecord(msgspec.Struct, frozen=True, tag="rebase"):
    """The run's state was lost; commands below `seq_id` that have no record are given up."""

    seq_id: int


Record = CommandRecord | AnswerRecord | AttemptRecord | CancelRecord | RebaseRecord

_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class JournalDamagedError(Exception):
    """A journal or snapshot does not match its checksums, or is incomplete."""


def encode_record(record: Record) -> bytes:
    """Encode a record, preceded by its length."""
    payload = msgspec.msgpack.encode(record)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def encode_records(records: Iterable[Record]) -> bytes:
    """Encode records one after the other."""
    return b"".join(map(encode_record, records))


def decode_records(data: bytes) -> list[Record]:
    """Decode consecutive records. Raises msgspec.MsgspecError; the caller must verify checksums."""
    records, offset = list[Record](), 0
    while offset < len(data):
        start = offset + _LENGTH_BYTES
        offset = start + int.from_bytes(data[offset:start], "little")
        records.append(_decoder.decode(data[start:offset]))
    return records


@dataclass(frozen=True, order=True, slots=True)
class SegmentName:
    """The name of a segment. One with the same base and a higher generation continues one that was abandoned."""

    base: int
    """seq_id of the first command that the segment can hold."""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment."""

    key: bytes
    previous: SegmentName | None
    """The preceding segment; None for the first segment of a journal."""
    previous_bytes: int
    """Number of valid bytes in that segment."""

    @classmethod
    def new(cls, previous: SegmentName | None, previous_bytes: int) -> Header:
        """Create a header with a new random key."""
        return cls(os.urandom(16), previous, previous_bytes)

    def encode(self) -> bytes:
        """Encode the header as UNIT bytes."""
        before = self.previous or SegmentName(0)
        packed = _HEADER.pack(_MAGIC, self.key, before.base, before.generation, 0, self.previous_bytes)
        return packed.ljust(UNIT - 4, b"\0") + _crc(packed).to_bytes(4, "little")


@dataclass(slots=True)
class Segment:
    """The decoded content of a segment."""

    header: Header
    records: list[Record] = field(default_factory=list)
    good_bytes: int = 0
    """Length of the intact prefix."""
    is_damaged: bool = False
    """Whether bytes that were durable have changed."""
    last_seq_id: int = 0
    """Highest accepted seq_id according to any readable part of the segment."""


def encode_frame(header: Header, offset: int, durable: int, last_seq_id: int, payload: bytes) -> bytes:
    """Encode a frame for position `offset` that holds `payload`, which is encoded records."""
    fields = _SEAL.pack(_MARK, len(payload), _crc(payload), durable, last_seq_id)
    frame = fields + _tag(header.key, offset, fields) + payload
    return frame.ljust(-(-len(frame) // UNIT) * UNIT, b"\0")


def decode_segment(data: bytes) -> Segment:
    """Decode a segment, or the beginning of one.

    Raises JournalDamagedError if nothing can be read, UnknownFormatError.
    """
    check_magic(data, "a journal")
    header = _decode_header(data)
    segment = Segment(header)
    _decode_frames(segment, header, data)
    return segment


def check_magic(data: bytes, name: str) -> None:
    """Check that a file that starts with `data` has this format, or none. Raises UnknownFormatError."""
    if data[: len(_FAMILY)] == _FAMILY and data[: len(_MAGIC)] not in {_MAGIC, _FAMILY}:
        raise UnknownFormatError(
            f"{name} has unknown format {data[len(_FAMILY) : len(_MAGIC)].decode(errors='replace')!r}"
        )


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


def _decode_frames(segment: Segment, header: Header, data: bytes) -> None:
    """Decode frames up to the first incomplete one; after it, read only the seals."""
    offset, first_bad = UNIT, len(data)
    while offset < len(data):
        seal = _seal_at(header.key, data, offset)
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
