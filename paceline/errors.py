"""The error catalog: one class per reason, the same on the server that raises it and the client that receives it.

    PacelineError
    ├── InvalidArgument      the request is wrong; the same call will fail again
    ├── NotFound             no such object, or it belongs to another tenant
    ├── Conflict             a key or a name is taken
    ├── FailedPrecondition   the run's state does not allow this
    ├── Exhausted            a limit was reached; some carry `retry_after`
    ├── Denied               the caller or the method is not allowed
    ├── Unavailable          try again; carries `retry_after`
    ├── DataLoss             bytes differ from their checksum
    ├── TimedOut, Cancelled, Unsupported
    └── Internal             an unexpected failure

Every leaf has a `reason`, listed in `paceline.types.v1.ErrorReason` and explained in docs/errors.md. An error may carry
`field` (the field, argument or variable at fault), `metadata` (the message's values, for programs) and `retry_after`
(seconds).
"""

from __future__ import annotations

from collections.abc import Sized
from enum import Enum, IntEnum
from typing import ClassVar, Self
from uuid import uuid4


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


class Fate(Enum):
    """What an error says of the command of a run that ended in it."""

    ANSWERED = "answered"
    """The error is the trainer's answer to the command."""
    TURNED_AWAY = "turned away"
    """The trainer does not have the command: it has not executed, and will not."""
    UNKNOWN = "unknown"
    """It may have executed, or may yet."""


CATALOG: dict[str, type[PacelineError]] = {}
"""The class of every reason that can be sent."""


class PacelineError(Exception):
    """Base of every error that crosses the wire.

    `message` is public: it names what is wrong and what to do, and holds no token, prompt or key.
    """

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    default_retry_after: ClassVar[float | None] = None
    fate: Fate | None = None
    """What became of the run's command that ended in this error; None for errors of other calls.

    Set by who sends the command. The Python client also sets it if it refuses a command before anything is sent."""

    def __init_subclass__(cls, *, reason: str = "") -> None:
        """Enter a class with a `reason` into the catalog; one without is a group, or known only in its own service."""
        super().__init_subclass__()
        if reason:
            cls.reason = reason
            CATALOG[reason] = cls

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


class Internal(PacelineError, reason="INTERNAL"):
    """An unexpected failure; `metadata["error_id"]` identifies it in the service's log."""

    @classmethod
    def unforeseen(cls) -> Internal:
        """Return an error with a new id; the caller logs the id together with the cause."""
        error_id = uuid4().hex
        return cls(f"internal error; the service's log has it under {error_id}", metadata={"error_id": error_id})

    @property
    def error_id(self) -> str:
        """The id of the error in the service's log; empty if nothing was logged."""
        return self.metadata.get("error_id", "")


# The request is wrong: the same call will fail again.


class InvalidArgument(PacelineError, reason="INVALID_FIELD"):
    """A field has a value that no more specific class covers."""

    code = Code.INVALID_ARGUMENT

    @classmethod
    def of_type(cls, value: object, wanted: str, field: str) -> Self:
        """Return the error of a value of the wrong type; `wanted` says what to give instead."""
        kind = type(value).__name__
        if kind.endswith("Future"):
            wanted = f"what its .result() returns: {wanted}"
        return cls(f"is of type {kind}; give {wanted}", field=field, metadata={"wanted": wanted})

    @classmethod
    def must_be(cls, wanted: str, field: str) -> Self:
        """Return the error of a value of the wrong type in JSON."""
        return cls(f"must be {wanted}", field=field, metadata={"wanted": wanted})


class UnreadableMessage(InvalidArgument, reason="UNREADABLE_MESSAGE"):
    """A message is missing, or its bytes do not parse as a message of the contract."""


class MissingField(InvalidArgument, reason="MISSING_FIELD"):
    """A required field is not set."""


class UnknownField(InvalidArgument, reason="UNKNOWN_FIELD"):
    """A loss setting, loss input or optimizer setting is not known."""


class UnknownLoss(InvalidArgument, reason="UNKNOWN_LOSS"):
    """The service does not offer this loss."""


class EmptyBatch(InvalidArgument, reason="EMPTY_BATCH"):
    """A batch holds no datum, or a datum no token."""


class InvalidDtype(InvalidArgument, reason="INVALID_DTYPE"):
    """The field does not accept the tensor's dtype."""


class InvalidShape(InvalidArgument, reason="INVALID_SHAPE"):
    """A tensor's shape or byte length does not fit."""


class OutOfRange(InvalidArgument, reason="OUT_OF_RANGE"):
    """A number is outside its range."""

    @classmethod
    def of_length(cls, value: Sized, most: int, message: str, field: str) -> Self:
        """Return the error of a text or a list that is too long, or empty; `message` says what to give instead."""
        what = "string" if isinstance(value, str) else "array"
        return cls(message, field=field, metadata={"length": str(len(value)), "maximum": str(most), "of": what})


class TokenOutOfRange(InvalidArgument, reason="TOKEN_OUT_OF_RANGE"):
    """A token id is negative, or not below the vocabulary size."""


class NonFinite(InvalidArgument, reason="NON_FINITE"):
    """NaN or infinity where a finite number is required."""


class PositiveLogprob(InvalidArgument, reason="POSITIVE_LOGPROB"):
    """A log-probability above 0 at a counted position."""


class SequenceTooLong(InvalidArgument, reason="SEQUENCE_TOO_LONG"):
    """More tokens than the context length."""


class RankTooLarge(InvalidArgument, reason="RANK_TOO_LARGE"):
    """The LoRA rank is above the maximum of the trainer or a sampler."""


class InvalidName(InvalidArgument, reason="INVALID_NAME"):
    """A name with characters that are not allowed."""


class InvalidPath(InvalidArgument, reason="INVALID_PATH"):
    """The path is not a checkpoint path."""


class InvalidPageToken(InvalidArgument, reason="INVALID_PAGE_TOKEN"):
    """The page token was not returned by a list call."""


# The object that a request names is missing, taken, or in the wrong state.

_RUNS = "list_runs returns those that exist"


class NotFound(PacelineError):
    """No such object, or it belongs to another tenant."""

    code = Code.NOT_FOUND


class ModelNotFound(NotFound, reason="MODEL_NOT_FOUND"):
    """No such base model."""

    @classmethod
    def of(cls, served: str, field: str) -> Self:
        """Return the error of a name other than the served model's."""
        return cls(f"no such base model; {served} is served: give that name, or none", field=field)


class RunNotFound(NotFound, reason="RUN_NOT_FOUND"):
    """No such run, or it belongs to another tenant."""

    @classmethod
    def of(cls, run_id: str, field: str) -> Self:
        """Return the error that names the run."""
        return cls(f"no such run: {run_id[:100]}; {_RUNS}", field=field)

    @classmethod
    def deleted(cls, field: str) -> Self:
        """Return the error of a call that its run's deletion ended."""
        return cls(f"the run was deleted; {_RUNS}", field=field)


class VersionNotFound(NotFound, reason="VERSION_NOT_FOUND"):
    """No such version, or it is no longer kept."""

    @classmethod
    def of(cls, what: str, field: str) -> Self:
        """Return the error that says what is missing."""
        remedy = "get_run tells the newest (latest_version), and save_weights_for_sampler keeps weights that must last"
        return cls(f"{what}; {remedy}", field=field)

    @classmethod
    def unpublished(cls, field: str) -> Self:
        """Return the error of a run without versions."""
        return cls("the run has no version yet; publish its weights (publish_weights) first", field=field)


class CheckpointNotFound(NotFound, reason="CHECKPOINT_NOT_FOUND"):
    """No such checkpoint, or it belongs to another tenant."""

    @classmethod
    def of(cls, path: object, field: str) -> Self:
        """Return the error that names the checkpoint's path."""
        message = f"no such checkpoint: {str(path)[:300]}; it was never saved, was deleted, or its ttl_seconds passed"
        return cls(f"{message}. list_checkpoints returns those that exist", field=field)


class Conflict(PacelineError):
    """A key or a name is taken."""

    code = Code.ALREADY_EXISTS


class SeqIdReused(Conflict, reason="SEQ_ID_REUSED"):
    """The seq_id was used with another payload."""


class RequestIdReused(Conflict, reason="REQUEST_ID_REUSED"):
    """The request_id was used with another payload."""


class CheckpointExists(Conflict, reason="CHECKPOINT_EXISTS"):
    """A checkpoint with this name exists."""


class VersionExists(Conflict, reason="VERSION_EXISTS"):
    """The version exists with different content."""


class SamplerExists(Conflict, reason="SAMPLER_EXISTS"):
    """Another sampler watches the trainer under this name, or this sampler opened a newer watch."""


class FailedPrecondition(PacelineError):
    """The run's state does not allow this."""

    code = Code.FAILED_PRECONDITION


class SeqIdExpired(FailedPrecondition, reason="SEQ_ID_EXPIRED"):
    """The command was executed, but its answer is no longer kept."""


class ClientSuperseded(FailedPrecondition, reason="CLIENT_SUPERSEDED"):
    """Another client attached to the run later; only its commands are accepted."""


class CommandCancelled(FailedPrecondition, reason="COMMAND_CANCELLED"):
    """The command had not started when another client attached and had such commands cancelled; nothing changed."""


class PrecedingRefused(FailedPrecondition, reason="PRECEDING_REFUSED"):
    """A command on which this one depends was refused; `metadata["seq_id"]` is its place. Nothing changed."""


class Forked(FailedPrecondition, reason="CLIENT_FORKED"):
    """The process was forked from one that had used a client, so gRPC does not work in it. Raised by the client."""


class RunStateLost(FailedPrecondition, reason="RUN_STATE_LOST"):
    """The run's state was lost with the engine, and its journal cannot be replayed.

    `metadata["checkpoint"]` is the path of the newest state checkpoint; empty if there is none.
    """


class PoisonedCommand(FailedPrecondition, reason="POISONED_COMMAND"):
    """The engine died each time it executed the command; `metadata["attempts"]` is the number of attempts."""


class NoGradient(FailedPrecondition, reason="NO_GRADIENT"):
    """OptimStep was called without a gradient."""


class NonFiniteGradient(FailedPrecondition, reason="NON_FINITE_GRADIENT"):
    """The gradient holds NaN or infinity; it was dropped and no step was taken."""


class NonFiniteLoss(FailedPrecondition, reason="NON_FINITE_LOSS"):
    """The loss or its gradient holds NaN or infinity; as requested, the call was refused and added no gradient.

    `metadata["positions"]` is the number of positions with a non-finite loss, `metadata["gradient_elements"]` the
    number of non-finite elements of the gradient.
    """


class OptimizerChanged(FailedPrecondition, reason="OPTIMIZER_CHANGED"):
    """The run has the state of another optimizer, or of this one with another rank or seed.

    `metadata["optimizer"]` is the name of the run's optimizer.
    """


class CheckpointMismatch(FailedPrecondition, reason="CHECKPOINT_MISMATCH"):
    """The checkpoint does not fit the run."""


class ModelNotLoadable(FailedPrecondition, reason="MODEL_NOT_LOADABLE"):
    """The sampler's engine cannot load these weights; it keeps serving the previous ones."""


class NotServable(FailedPrecondition, reason="NOT_SERVABLE"):
    """No watching sampler can serve what the run trains; `field` is the field of CreateRun that decides it."""


class NotServableWarning(UserWarning):
    """A new run could be saved, but not published: no watching sampler can serve what it trains."""


class SeqIdGap(PacelineError, reason="SEQ_ID_GAP"):
    """Earlier commands of the run did not arrive in time."""

    code = Code.ABORTED


class BaseMismatch(FailedPrecondition, reason="BASE_MISMATCH"):
    """Base weights differ: between trainer and sampler, or from those that a run, checkpoint or version was made on.

    `metadata["ours"]` and `metadata["theirs"]` are their identities (`ModelInfo.weights_sha256`) if those differ. If a
    sampler's results for a run's version differ from the trainer's, `metadata` has `run_id`, `version`,
    `mean_difference` and `bound`.
    """


# The service cannot or will not answer: limits, identity, availability, damage.


class Exhausted(PacelineError):
    """A limit was reached."""

    code = Code.RESOURCE_EXHAUSTED


class Overloaded(Exhausted, reason="OVERLOADED"):
    """The service has more work than it accepts at present."""

    default_retry_after = 1.0


class QuotaExceeded(Exhausted, reason="QUOTA_EXCEEDED"):
    """The tenant is at a quota, or the call would exceed it.

    `metadata` holds `quota` (its name; WhoAmI lists them), `used` and `limit`. With `retry_after`, waiting is enough;
    otherwise something must be deleted, or the operator must raise the limit.
    """


class TooManyRuns(QuotaExceeded, reason="TOO_MANY_RUNS"):
    """The tenant has the maximum number of runs."""


class MessageTooLarge(Exhausted, reason="MESSAGE_TOO_LARGE"):
    """The message is larger than the service accepts."""


class OutOfMemory(Exhausted, reason="OUT_OF_MEMORY"):
    """The engine ran out of memory.

    For a sequence that does not fit, `metadata["tokens"]` is its length and `metadata["fitting_tokens"]` a length that
    would fit.
    """


class DiskFull(Exhausted, reason="DISK_FULL"):
    """The checkpoint volume is full."""


class ReaderStalled(Exhausted, reason="READER_STALLED"):
    """The reader of a stream stopped or left too much of it unread; the stream's resources were freed."""


class Denied(PacelineError):
    """The caller or the method is not allowed."""

    code = Code.PERMISSION_DENIED


class InvalidApiKey(Denied, reason="INVALID_API_KEY"):
    """The API key is missing or unknown."""

    code = Code.UNAUTHENTICATED


class ApiKeyExpired(InvalidApiKey, reason="API_KEY_EXPIRED"):
    """The API key has expired; `metadata["expired"]` is when (RFC 3339)."""


class MissingCredential(Denied, reason="MISSING_CREDENTIAL"):
    """The call did not come from the gateway or a service."""

    code = Code.UNAUTHENTICATED


class MethodNotAllowed(Denied, reason="METHOD_NOT_ALLOWED"):
    """The key may not call this method."""


class Unavailable(PacelineError):
    """The service cannot answer now; the same call may succeed shortly."""

    code = Code.UNAVAILABLE
    default_retry_after = 1.0


class EngineUnavailable(Unavailable, reason="ENGINE_UNAVAILABLE"):
    """The engine is restarting."""


class TrainerUnavailable(Unavailable, reason="TRAINER_UNAVAILABLE"):
    """The sampler cannot reach the trainer."""


class PeerLost(Unavailable, reason="PEER_LOST"):
    """The process group of trainer and samplers lost a member or was never complete; a new one is being made."""


class BaseUnavailable(Unavailable, reason="BASE_UNAVAILABLE"):
    """The sampler that lends its base weights to the trainer is not running."""


class UpstreamUnavailable(Unavailable, reason="UPSTREAM_UNAVAILABLE"):
    """The gateway cannot reach the service, or the client cannot reach the gateway."""


class ShuttingDown(Unavailable, reason="SHUTTING_DOWN"):
    """The service is stopping."""


class DataLoss(PacelineError):
    """Stored or received bytes are damaged."""

    code = Code.DATA_LOSS


class ChecksumMismatch(DataLoss, reason="CHECKSUM_MISMATCH"):
    """Bytes differ from their checksum."""


class TimedOut(PacelineError, reason="DEADLINE_EXCEEDED"):
    """The call's deadline passed; the command may have been executed."""

    code = Code.DEADLINE_EXCEEDED


class AckTimeout(TimedOut, reason="ACK_TIMEOUT"):
    """Samplers did not acknowledge the version in time; the version exists nevertheless."""


class Cancelled(PacelineError, reason="CANCELLED"):
    """The caller cancelled the call."""

    code = Code.CANCELLED


class Unsupported(PacelineError, reason="UNIMPLEMENTED"):
    """The method does not exist, or not for this kind of run or model."""

    code = Code.UNIMPLEMENTED


def _listing() -> str:
    """Return one line for each class: its reason, and what has happened."""
    classes = [each for each in globals().values() if isinstance(each, type) and issubclass(each, PacelineError)]
    lines = (
        f"    {cls.__name__}: {(cls.__doc__ or '').splitlines()[0]}" for cls in classes if cls is not PacelineError
    )
    return "\n".join(("", "Classes:", *lines))


# `help(paceline.errors)` shows in full what all classes share, and names each of them.
__doc__ = f"{__doc__}{_listing()}"
__all__ = ["Fate", "NotServableWarning", "PacelineError"]
