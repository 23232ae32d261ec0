"""The error catalog: one class per reason, the same on the server that raises it and the client that receives it.

    PacelineError
    ├── InvalidArgument      the request is wrong; the same call will fail again
    ├── NotFound             no such object, or another tenant's
    ├── Conflict             a key or a name is taken
    ├── FailedPrecondition   the run is not in a state for this
    ├── Exhausted            a limit was reached; some carry `retry_after`
    ├── Denied               who called, or what, is not allowed
    ├── Unavailable          try again; carries `retry_after`
    ├── DataLoss             bytes differ from their checksum
    ├── TimedOut, Cancelled, Unsupported
    └── Internal             anything that nobody foresaw

Every leaf has a `reason`, listed in `paceline.types.v1.ErrorReason` and explained in docs/errors.md. An error may
carry `field` (the request field at
fault), `metadata` (facts of the message, for programs) and `retry_after` (seconds).
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class Code(IntEnum):
    """Canonical gRPC status codes, kept here so that engines can raise errors without importing grpc."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class PacelineError(Exception):
    """Base of every error that crosses the wire.

    `message` is public: it names what is wrong and what to do, and holds no token, prompt or key.
    """

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    default_retry_after: ClassVar[float | None] = None

    def __init__(
        self, message: str, *, field: str = "", metadata: dict[str, str] | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = metadata or {}
        self.retry_after = self.default_retry_after if retry_after is None else retry_after

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidArgument(PacelineError):
    """A field has a value that no more specific class covers."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_FIELD"


class MissingField(InvalidArgument):
    """A required field is not set."""

    reason = "MISSING_FIELD"


class UnknownField(InvalidArgument):
    """A loss setting, loss input or optimizer setting is not known."""

    reason = "UNKNOWN_FIELD"


class UnknownLoss(InvalidArgument):
    """The loss is not served."""

    reason = "UNKNOWN_LOSS"


class EmptyBatch(InvalidArgument):
    """A batch holds no datum, or a datum no token."""

    reason = "EMPTY_BATCH"


class InvalidDtype(InvalidArgument):
    """A tensor's dtype is not one that the field takes."""

    reason = "INVALID_DTYPE"


class InvalidShape(InvalidArgument):
    """A tensor's shape or byte length does not fit."""

    reason = "INVALID_SHAPE"


class OutOfRange(InvalidArgument):
    """A number lies outside its range."""

    reason = "OUT_OF_RANGE"


class TokenOutOfRange(InvalidArgument):
    """A token id is negative or not below the vocabulary's size."""

    reason = "TOKEN_OUT_OF_RANGE"


class NonFinite(InvalidArgument):
    """NaN or infinity where a finite number is needed."""

    reason = "NON_FINITE"


class PositiveLogprob(InvalidArgument):
    """A log-probability above 0 on a position that counts."""

    reason = "POSITIVE_LOGPROB"


class SequenceTooLong(InvalidArgument):
    """More tokens than the context length."""

    reason = "SEQUENCE_TOO_LONG"


class RankTooLarge(InvalidArgument):
    """LoRA rank above what trainer or sampler takes."""

    reason = "RANK_TOO_LARGE"


class InvalidName(InvalidArgument):
    """A name with characters that are not allowed."""

    reason = "INVALID_NAME"


class InvalidPath(InvalidArgument):
    """Not a checkpoint path."""

    reason = "INVALID_PATH"


class InvalidPageToken(InvalidArgument):
    """The page token is not one that a list returned."""

    reason = "INVALID_PAGE_TOKEN"


class NotFound(PacelineError):
    """No such object, or another tenant's."""

    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """No such base model."""

    reason = "MODEL_NOT_FOUND"


class RunNotFound(NotFound):
    """No such run, or another tenant's."""

    reason = "RUN_NOT_FOUND"


class VersionNotFound(NotFound):
    """No such version, or no longer kept."""

    reason = "VERSION_NOT_FOUND"


class CheckpointNotFound(NotFound):
    """No such checkpoint, or another tenant's."""

    reason = "CHECKPOINT_NOT_FOUND"


class Conflict(PacelineError):
    """A key or a name is taken."""

    code = Code.ALREADY_EXISTS


class SeqIdReused(Conflict):
    """The seq_id was used with another payload."""

    reason = "SEQ_ID_REUSED"


class RequestIdReused(Conflict):
    """The request_id was used with another payload."""

    reason = "REQUEST_ID_REUSED"


class CheckpointExists(Conflict):
    """A checkpoint of this name exists."""

    reason = "CHECKPOINT_EXISTS"


class VersionExists(Conflict):
    """The version exists with other content."""

    reason = "VERSION_EXISTS"


class FailedPrecondition(PacelineError):
    """The run is not in a state for this."""

    code = Code.FAILED_PRECONDITION


class SeqIdExpired(FailedPrecondition):
    """The command was executed, but its answer is no longer kept."""

    reason = "SEQ_ID_EXPIRED"


class RunStateLost(FailedPrecondition):
    """The run's weights in memory were lost.

    `metadata["checkpoint"]` is the path of the newest state checkpoint, empty where there is none.
    """

    reason = "RUN_STATE_LOST"


class NoGradient(FailedPrecondition):
    """OptimStep without a gradient."""

    reason = "NO_GRADIENT"


class NonFiniteGradient(FailedPrecondition):
    """The gradient holds NaN or infinity; it was dropped and no step was taken."""

    reason = "NON_FINITE_GRADIENT"


class CheckpointMismatch(FailedPrecondition):
    """The checkpoint does not fit the run."""

    reason = "CHECKPOINT_MISMATCH"


class SeqIdGap(PacelineError):
    """Commands before this one did not arrive in time."""

    code = Code.ABORTED
    reason = "SEQ_ID_GAP"


class Exhausted(PacelineError):
    """A limit was reached."""

    code = Code.RESOURCE_EXHAUSTED


class Overloaded(Exhausted):
    """More work than the service takes now."""

    reason = "OVERLOADED"
    default_retry_after = 1.0


class TooManyRuns(Exhausted):
    """The tenant has as many runs as it may."""

    reason = "TOO_MANY_RUNS"


class MessageTooLarge(Exhausted):
    """The message is larger than the service takes."""

    reason = "MESSAGE_TOO_LARGE"


class OutOfMemory(Exhausted):
    """The engine ran out of memory."""

    reason = "OUT_OF_MEMORY"


class DiskFull(Exhausted):
    """The checkpoint volume is full."""

    reason = "DISK_FULL"


class Denied(PacelineError):
    """Who called, or what, is not allowed."""

    code = Code.PERMISSION_DENIED


class InvalidApiKey(Denied):
    """No API key, or one that is not known."""

    code = Code.UNAUTHENTICATED
    reason = "INVALID_API_KEY"


class MissingCredential(Denied):
    """The call did not come from the gateway or a service."""

    code = Code.UNAUTHENTICATED
    reason = "MISSING_CREDENTIAL"


class MethodNotAllowed(Denied):
    """The key may not call this method."""

    reason = "METHOD_NOT_ALLOWED"


class Unavailable(PacelineError):
    """The service cannot answer now; the same call may work in a moment."""

    code = Code.UNAVAILABLE
    default_retry_after = 1.0


class EngineUnavailable(Unavailable):
    """The engine is starting again."""

    reason = "ENGINE_UNAVAILABLE"


class TrainerUnavailable(Unavailable):
    """The sampler cannot reach the trainer."""

    reason = "TRAINER_UNAVAILABLE"


class UpstreamUnavailable(Unavailable):
    """The gateway, or the network on the way to it, cannot reach the service."""

    reason = "UPSTREAM_UNAVAILABLE"


class ShuttingDown(Unavailable):
    """The service is stopping."""

    reason = "SHUTTING_DOWN"


class DataLoss(PacelineError):
    """Stored or received bytes are damaged."""

    code = Code.DATA_LOSS


class ChecksumMismatch(DataLoss):
    """Bytes differ from their checksum."""

    reason = "CHECKSUM_MISMATCH"


class TimedOut(PacelineError):
    """The call's deadline passed; the command may have been executed."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class AckTimeout(TimedOut):
    """Samplers did not acknowledge the version in time; it exists all the same."""

    reason = "ACK_TIMEOUT"


class Cancelled(PacelineError):
    """The caller cancelled."""

    code = Code.CANCELLED
    reason = "CANCELLED"


class Unsupported(PacelineError):
    """No such method."""

    code = Code.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"


class Internal(PacelineError):
    """Anything that nobody foresaw; `metadata["error_id"]` finds it in the service's log."""


def _leaves(cls: type[PacelineError]) -> list[type[PacelineError]]:
    own = [cls] if "reason" in vars(cls) or cls is Internal else []
    return own + [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]


CATALOG: dict[str, type[PacelineError]] = {
    leaf.reason: leaf for leaf in _leaves(PacelineError) if leaf is not PacelineError
}
"""Every reason that can be sent, with its class."""
