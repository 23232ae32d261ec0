"""What a journal holds: records in msgpack, each behind its length (u32, little-endian)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trainer_service.engine.messages import Failure

_LENGTH_BYTES = 4


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


class CommandRecord(msgspec.Struct, frozen=True, tag="command", omit_defaults=True):
    """A command that was accepted; written before it is executed."""

    seq_id: int
    method: str
    tenant: str
    request: bytes
    """Without its content where the command was refused."""
    refusal: Failure | None = None
    """What it answers at its turn, where it was refused as it came."""
    digest: bytes = b""
    """Of the request as it came, where it was refused."""


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
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def encode_records(records: Iterable[Record]) -> bytes:
    """Return the bytes of records, one behind the other."""
    return b"".join(map(encode, records))


def decode_records(data: bytes) -> list[Record]:
    """Read records, one behind the other. Raises msgspec.MsgspecError; checksums are the caller's to compare."""
    records, offset = [], 0
    while offset < len(data):
        start = offset + _LENGTH_BYTES
        offset = start + int.from_bytes(data[offset:start], "little")
        records.append(decode_record(data[start:offset]))
    return records


def decode_record(payload: bytes) -> Record:
    """Read a record without its length. Raises msgspec.MsgspecError."""
    record: Record = _decoder.decode(payload)
    return record
