"""A run's command: what it is, whose it is, and how it stands in the journal."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from google.protobuf.message import Message

from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.engine.messages import Failure
from trainer_service.journal.records import AnswerRecord, CommandRecord, Facts

Answer = Message | errors.PacelineError
"""What a command answers: a reply or a refusal."""

_REPLIES: dict[str, Any] = {
    method: getattr(pb, f"{method}Response")
    for method in ("ForwardBackward", "OptimStep", "SaveCheckpoint", "LoadCheckpoint", "PublishWeights")
}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Command:
    """A command of a run, decoded and as bytes."""

    seq_id: int
    method: str
    """Name of its RPC."""
    tenant: str
    """The caller's; empty for a service."""
    request: Any
    """Message of the RPC; of a command that was refused as it came, without its content."""
    size: int
    """Bytes of the message as it came, which gRPC keeps until the call is answered."""
    digest: bytes
    """SHA-256 that tells a repeated command from another one with the same seq_id."""
    refusal: errors.PacelineError | None = None
    """What it answers at its turn, where it was refused as it came: then nothing of its content is kept."""

    @property
    def attachment(self) -> int:
        """Which of the clients that attached to the run sent it; 0 is one that did not attach."""
        return int(self.request.attachment)

    @classmethod
    def of(cls, request: Any, tenant: str) -> Command:
        """Make the command of a request, whose type is named for its RPC."""
        payload = request.SerializeToString(deterministic=True)
        method = type(request).__name__.removesuffix("Request")
        return cls(request.seq_id, method, tenant, request, len(payload), request_digest(f"{method}Request", payload))

    @classmethod
    def from_record(cls, record: CommandRecord) -> Command:
        """Read a command back from the journal."""
        request = getattr(pb, f"{record.method}Request").FromString(record.request)
        digest = record.digest or request_digest(f"{record.method}Request", record.request)
        refusal = record.refusal.error() if record.refusal else None
        return cls(record.seq_id, record.method, record.tenant, request, len(record.request), digest, refusal)

    def refused(self, error: errors.PacelineError) -> Command:
        """Return what is left of a command that is refused as it comes: its place in the run's order."""
        request = type(self.request)(run_id=self.request.run_id, seq_id=self.seq_id, attachment=self.attachment)
        return Command(self.seq_id, self.method, self.tenant, request, self.size, self.digest, error)

    def to_record(self) -> CommandRecord:
        """Return what the journal keeps."""
        payload = self.request.SerializeToString(deterministic=True)
        if self.refusal is None:
            return CommandRecord(self.seq_id, self.method, self.tenant, payload)
        return CommandRecord(self.seq_id, self.method, self.tenant, payload, Failure.of(self.refusal), self.digest)


def answer_to_record(command: Command, answer: Answer, facts: Facts, version: int = 0) -> AnswerRecord:
    """Return what the journal keeps of an answer, with what is known of the run and the version that was made."""
    failure = Failure.of(answer) if isinstance(answer, errors.PacelineError) else None
    reply = None if isinstance(answer, errors.PacelineError) else answer.SerializeToString()
    return AnswerRecord(command.seq_id, command.digest, command.method, reply, failure, facts, version)


def answer_from_record(record: AnswerRecord) -> Answer | None:
    """Read an answer back; None when it was no longer kept."""
    if record.failure is not None:
        return record.failure.error()
    if record.reply is None:
        return None
    reply: Message = _REPLIES[record.method].FromString(record.reply)
    return reply


def poisoned(deaths: int) -> errors.PoisonedCommand:
    """Make the answer of a command that the engine died of too often."""
    message = f"the engine died {deaths} time(s) while it executed this; it is not tried again"
    return errors.PoisonedCommand(message, field="seq_id", metadata={"attempts": str(deaths)})


def request_digest(message: str, payload: bytes) -> bytes:
    """Return the SHA-256 of a request: of its message's name and its deterministic serialization."""
    return sha256(message.encode() + payload).digest()
