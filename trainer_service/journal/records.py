"""Journal records: msgpack, each preceded by its length (u32, little-endian)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trainer_service.engine.messages import Failure

_LENGTH_BYTES = 4


class Facts(msgspec.Struct, frozen=True):
    """What the service knows about a run.

    In a journaled answer, `step` and `next_version` are the values after the command in the run's order. The others are
    the values when the answer was written; no earlier record has newer ones.
    """

    step: int = 0
    latest_version: int = 0
    next_version: int = 1
    latest_state_checkpoint: str = ""

    def at(self, place: Facts | None) -> Facts:
        """Return these facts with the `step` and `next_version` of a place in the run's order, if it is given."""
        if place is None:
            return self
        return msgspec.structs.replace(self, step=place.step, next_version=place.next_version)


class CommandRecord(msgspec.Struct, frozen=True, tag="command", omit_defaults=True):
    """An accepted command; written before it is executed."""

    seq_id: int
    method: str
    tenant: str
    request: bytes
    """Without its content if the command was refused."""
    refusal: Failure | None = None
    """What the command answers at its turn, if it was refused on arrival."""
    digest: bytes = b""
    """Digest of the original request, if it was refused."""


class AnswerRecord(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to a command; written before the client receives it."""

    seq_id: int
    digest: bytes
    method: str
    reply: bytes | None
    """None for a refusal or a reply that is no longer kept."""
    failure: Failure | None = None
    facts: Facts = Facts()
    version: int = 0
    """Version that the command made, even if it was refused because nobody acknowledged the version; 0 for none."""


class AttemptRecord(msgspec.Struct, frozen=True, tag="attempt"):
    """The engine died while executing the command."""

    seq_id: int


class RebaseRecord(msgspec.Struct, frozen=True, tag="rebase"):
    """The run's state was lost; commands below `seq_id` that have no record are given up."""

    seq_id: int


Record = CommandRecord | AnswerRecord | AttemptRecord | RebaseRecord

_decoder = msgspec.msgpack.Decoder(Record)


class JournalDamagedError(Exception):
    """A journal or snapshot does not match its checksums, or is incomplete."""


def encode(record: Record) -> bytes:
    """Encode a record, preceded by its length."""
    payload = msgspec.msgpack.encode(record)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def encode_records(records: Iterable[Record]) -> bytes:
    """Encode records one after the other."""
    return b"".join(map(encode, records))


def decode_records(data: bytes) -> list[Record]:
    """Decode consecutive records. Raises msgspec.MsgspecError; the caller must verify checksums."""
    records, offset = [], 0
    while offset < len(data):
        start = offset + _LENGTH_BYTES
        offset = start + int.from_bytes(data[offset:start], "little")
        records.append(decode_record(data[start:offset]))
    return records


def decode_record(payload: bytes) -> Record:
    """Decode a record without its length. Raises msgspec.MsgspecError."""
    record: Record = _decoder.decode(payload)
    return record
