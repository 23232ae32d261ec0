"""A run's commands and their answers, decoded, compared if repeated, and as records of the journal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from time import perf_counter
from typing import Any

import msgspec
from google.protobuf.message import Message

from paceline import errors
from paceline.log import get_logger
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.journal.format import AnswerRecord, CommandRecord, Counters, RecordedError

_KEPT_BYTES = 64 << 20
"""Bytes of replies kept per run."""
_KEPT_DIGESTS = 10_000
"""Digests kept per run, to tell a repeated command from a reused seq_id after its answer was dropped."""

Answer = Message | errors.PacelineError
"""Answer of a command: a reply or an error."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command came to: its answer, and the version that it made, whatever it answered."""

    answer: Answer
    version: int = 0
    """Number of the version; 0 for none."""
    version_blake3: str = ""
    """BLAKE3-256 of that version."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured and the answer does not say, by its name among the run's metrics."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Command:
    """A command of a run. What it asks for is in memory once: serialized until the journal has it, then decoded."""

    seq_id: int
    method: str
    """Name of its RPC."""
    tenant: str
    """The caller's tenant; empty for a service."""
    attachment: int
    """Number of the attached client that sent the command; 0 if that client did not attach."""
    size: int
    """Bytes of the message as it arrived, which gRPC keeps until the call is answered."""
    digest: bytes
    """SHA-256 that tells a repeated command from another command with the same seq_id."""
    payload: bytes = field(default=b"", compare=False, repr=False)
    """The request, without the attachment, serialized; empty once the journal has it, or the command was refused."""
    request: Any = field(default=None, compare=False, repr=False)
    """The same as a message; None once `content` was made of it, or the command was refused."""
    content: Any = field(default=None, compare=False, repr=False)
    """The request as its executor takes it, decoded and checked; None if that was not done yet."""
    refusal: errors.PacelineError | None = None
    """Error that a command answers which was refused before its turn."""
    arrived_at: float | None = field(default=None, compare=False, repr=False)
    """Seconds of `perf_counter`; None for one that was read from a journal."""
    trace: str = field(default="", compare=False, repr=False)
    """Traceparent of the call that sent it; empty if it is not traced."""

    @classmethod
    def of(cls, request: Any, tenant: str, trace: str = "") -> Command:
        """Build a command from its request, whose type is named after the RPC."""
        attachment = request.attachment
        request.ClearField("attachment")  # who sends a command does not make it another one
        payload = request.SerializeToString(deterministic=True)
        method = type(request).__name__.removesuffix("Request")
        digest = request_digest(f"{method}Request", payload)
        size, arrived_at = len(payload), perf_counter()
        return cls(
            request.seq_id,
            method,
            tenant,
            attachment,
            size,
            digest,
            payload,
            request,
            arrived_at=arrived_at,
            trace=trace,
        )

    @classmethod
    def from_record(cls, record: CommandRecord, *, is_cancelled: bool = False) -> Command:
        """Read a command from its journal record; with `is_cancelled`, as the one that it became afterwards."""
        command = cls(
            seq_id=record.seq_id,
            method=record.method,
            tenant=record.tenant,
            attachment=record.attachment,
            size=len(record.request),
            digest=record.digest or request_digest(f"{record.method}Request", record.request),
            request=getattr(pb, f"{record.method}Request").FromString(record.request),
            refusal=record.refusal.error() if record.refusal else None,
        )
        return command.cancelled() if is_cancelled else command

    def decoded(self, content: Any) -> Command:
        """Return the command with its request as its executor takes it."""
        return replace(self, content=content, request=None)

    def journaled(self) -> Command:
        """Return the command without what the journal holds."""
        return replace(self, payload=b"")

    def refused(self, error: errors.PacelineError) -> Command:
        """Return the command refused before its turn: the error and its place in the order, without its request."""
        return replace(self, payload=b"", request=None, content=None, refusal=error)

    def cancelled(self) -> Command:
        """Return the command refused because another client attached before it started."""
        message = "another client attached before this had started, and had such commands cancelled; nothing changed"
        return self.refused(errors.CommandCancelled(message, field="seq_id"))

    def to_record(self) -> CommandRecord:
        """Return the journal record."""
        refusal, digest = (RecordedError.of(self.refusal), self.digest) if self.refusal else (None, b"")
        return CommandRecord(self.seq_id, self.method, self.tenant, self.payload, refusal, digest, self.attachment)


class Answers:
    """The newest answers of a run, kept so that a repeated command gets its first answer."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        """Keep replies of `kept_bytes` in all; the newest is kept whatever its size."""
        self._most = kept_bytes
        self._records: OrderedDict[int, AnswerRecord] = OrderedDict()
        self._reply_bytes: OrderedDict[int, int] = OrderedDict()
        """Sizes of the replies that are kept, by seq_id."""
        self._kept_bytes = 0

    def __iter__(self) -> Iterator[AnswerRecord]:
        return iter(list(self._records.values()))

    def keep(self, record: AnswerRecord) -> None:
        """Keep an answer and drop the oldest ones beyond the limits."""
        seq_id = record.seq_id
        self._drop_reply(seq_id)
        self._records[seq_id] = record
        self._reply_bytes[seq_id] = len(record.reply or b"")
        self._kept_bytes += self._reply_bytes[seq_id]
        while self._kept_bytes > self._most and len(self._reply_bytes) > 1:
            self._drop_reply(next(iter(self._reply_bytes)))
        while len(self._records) > _KEPT_DIGESTS:
            oldest = next(iter(self._records))
            self._drop_reply(oldest)
            del self._records[oldest]

    def get(self, seq_id: int) -> AnswerRecord | None:
        """Return what is known of an answer, perhaps without the reply; None if it is not known."""
        return self._records.get(seq_id)

    def counters(self, seq_id: int) -> Counters | None:
        """Return the counters that the journal keeps with an answer; None if the answer is not known."""
        record = self._records.get(seq_id)
        return None if record is None else record.counters

    def _drop_reply(self, seq_id: int) -> None:
        if seq_id in self._reply_bytes:
            self._kept_bytes -= self._reply_bytes.pop(seq_id)
            self._records[seq_id] = msgspec.structs.replace(self._records[seq_id], reply=None)


def answer_of(command: Command, error: Exception) -> errors.PacelineError:
    """Return what a command answers that raised an error: Internal for one that nobody foresaw, which is logged."""
    if isinstance(error, errors.PacelineError):
        return error
    # It is kept as the answer like any other, so that it does not block later commands.
    answer = errors.Internal.unforeseen()
    _log.error("command failed", seq_id=command.seq_id, **answer.metadata, exc_info=error)
    return answer


def answer_to_record(command: Command, outcome: Outcome, counters: Counters) -> AnswerRecord:
    """Return the journal record of an answer, with the run's counters and the version that the command made."""
    answer = outcome.answer
    failure = RecordedError.of(answer) if isinstance(answer, errors.PacelineError) else None
    reply = None if isinstance(answer, errors.PacelineError) else answer.SerializeToString()
    return AnswerRecord(
        command.seq_id,
        command.digest,
        command.method,
        reply,
        failure,
        counters,
        outcome.version,
        outcome.version_blake3,
        command.attachment,
    )


def answer_from_record(record: AnswerRecord) -> Answer | None:
    """Read an answer from its journal record; None if the reply is no longer kept."""
    if record.failure is not None:
        return record.failure.error()
    if record.reply is None:
        return None
    reply: Message = getattr(pb, f"{record.method}Response").FromString(record.reply)
    return reply


def request_digest(message: str, payload: bytes) -> bytes:
    """Return the SHA-256 of a request's message name and its deterministic serialization."""
    return sha256(message.encode() + payload).digest()
