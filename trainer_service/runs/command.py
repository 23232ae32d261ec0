"""A run's command: its content, its tenant and its journal records."""

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
"""Answer of a command: a reply or an error."""

_REPLIES: dict[str, Any] = {
    method: getattr(pb, f"{method}Response")
    for method in ("ForwardBackward", "OptimStep", "SaveCheckpoint", "LoadCheckpoint", "PublishWeights")
}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Command:
    """A command of a run, with its decoded request."""

    seq_id: int
    method: str
    """Name of its RPC."""
    tenant: str
    """The caller's tenant; empty for a service."""
    request: Any
    """Message of the RPC; without its content if the command was refused on arrival."""
    size: int
    """Bytes of the message as it arrived, which gRPC keeps until the call is answered."""
    digest: bytes
    """SHA-256 that tells a repeated command from another command with the same seq_id."""
    refusal: errors.PacelineError | None = None
    """Error that a command refused on arrival answers at its turn; its content is not kept."""

    @property
    def attachment(self) -> int:
        """Number of the attached client that sent the command; 0 if that client did not attach."""
        return int(self.request.attachment)

    @classmethod
    def of(cls, request: Any, tenant: str) -> Command:
        """Build a command from its request, whose type is named after the RPC."""
        payload = request.SerializeToString(deterministic=True)
        method = type(request).__name__.removesuffix("Request")
        return cls(request.seq_id, method, tenant, request, len(payload), request_digest(f"{method}Request", payload))

    @classmethod
    def from_record(cls, record: CommandRecord) -> Command:
        """Read a command from its journal record."""
        request = getattr(pb, f"{record.method}Request").FromString(record.request)
        digest = record.digest or request_digest(f"{record.method}Request", record.request)
        refusal = record.refusal.error() if record.refusal else None
        return cls(record.seq_id, record.method, record.tenant, request, len(record.request), digest, refusal)

    def refused(self, error: errors.PacelineError) -> Command:
        """Return the command refused on arrival: the error and its place in the run's order, without its content."""
        request = type(self.request)(run_id=self.request.run_id, seq_id=self.seq_id, attachment=self.attachment)
        return Command(self.seq_id, self.method, self.tenant, request, self.size, self.digest, error)

    def to_record(self) -> CommandRecord:
        """Return the journal record."""
        payload = self.request.SerializeToString(deterministic=True)
        if self.refusal is None:
            return CommandRecord(self.seq_id, self.method, self.tenant, payload)
        return CommandRecord(self.seq_id, self.method, self.tenant, payload, Failure.of(self.refusal), self.digest)


def answer_to_record(command: Command, answer: Answer, facts: Facts, version: int = 0) -> AnswerRecord:
    """Return the journal record of an answer, with the run's facts and the version that the command made."""
    failure = Failure.of(answer) if isinstance(answer, errors.PacelineError) else None
    reply = None if isinstance(answer, errors.PacelineError) else answer.SerializeToString()
    return AnswerRecord(command.seq_id, command.digest, command.method, reply, failure, facts, version)


def answer_from_record(record: AnswerRecord) -> Answer | None:
    """Read an answer from its journal record; None if the reply is no longer kept."""
    if record.failure is not None:
        return record.failure.error()
    if record.reply is None:
        return None
    reply: Message = _REPLIES[record.method].FromString(record.reply)
    return reply


def poisoned(deaths: int) -> errors.PoisonedCommand:
    """Return the answer of a command during which the engine died too often."""
    message = f"the engine died {deaths} time(s) while it executed this; it is not tried again"
    return errors.PoisonedCommand(message, field="seq_id", metadata={"attempts": str(deaths)})


def request_digest(message: str, payload: bytes) -> bytes:
    """Return the SHA-256 of a request's message name and its deterministic serialization."""
    return sha256(message.encode() + payload).digest()
