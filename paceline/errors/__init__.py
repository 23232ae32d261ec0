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
`field` (the field, argument or variable at fault), `metadata` (the message's facts, for programs) and `retry_after`
(seconds).
"""

from __future__ import annotations

from paceline.errors.base import (
    Code,
    Internal,
    PacelineError,
)
from paceline.errors.requests import (
    EmptyBatch,
    InvalidArgument,
    InvalidDtype,
    InvalidName,
    InvalidPageToken,
    InvalidPath,
    InvalidShape,
    MissingField,
    NonFinite,
    OutOfRange,
    PositiveLogprob,
    RankTooLarge,
    SequenceTooLong,
    TokenOutOfRange,
    UnknownField,
    UnknownLoss,
    UnreadableMessage,
)
from paceline.errors.service import (
    AckTimeout,
    BaseUnavailable,
    Cancelled,
    ChecksumMismatch,
    DataLoss,
    Denied,
    DiskFull,
    EngineUnavailable,
    Exhausted,
    InvalidApiKey,
    MessageTooLarge,
    MethodNotAllowed,
    MissingCredential,
    OutOfMemory,
    Overloaded,
    PeerLost,
    QuotaExceeded,
    ReaderStalled,
    ShuttingDown,
    TimedOut,
    TooManyRuns,
    TrainerUnavailable,
    Unavailable,
    Unsupported,
    UpstreamUnavailable,
)
from paceline.errors.state import (
    BaseMismatch,
    CheckpointExists,
    CheckpointMismatch,
    CheckpointNotFound,
    ClientSuperseded,
    Conflict,
    FailedPrecondition,
    Forked,
    ModelNotFound,
    ModelNotLoadable,
    NoGradient,
    NonFiniteGradient,
    NonFiniteLoss,
    NotFound,
    OptimizerChanged,
    PoisonedCommand,
    RequestIdReused,
    RunNotFound,
    RunStateLost,
    SamplerExists,
    SeqIdExpired,
    SeqIdGap,
    SeqIdReused,
    VersionExists,
    VersionNotFound,
)

__all__ = [
    "CATALOG",
    "AckTimeout",
    "BaseMismatch",
    "BaseUnavailable",
    "Cancelled",
    "CheckpointExists",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "ChecksumMismatch",
    "ClientSuperseded",
    "Code",
    "Conflict",
    "DataLoss",
    "Denied",
    "DiskFull",
    "EmptyBatch",
    "EngineUnavailable",
    "Exhausted",
    "FailedPrecondition",
    "Forked",
    "Internal",
    "InvalidApiKey",
    "InvalidArgument",
    "InvalidDtype",
    "InvalidName",
    "InvalidPageToken",
    "InvalidPath",
    "InvalidShape",
    "MessageTooLarge",
    "MethodNotAllowed",
    "MissingCredential",
    "MissingField",
    "ModelNotFound",
    "ModelNotLoadable",
    "NoGradient",
    "NonFinite",
    "NonFiniteGradient",
    "NonFiniteLoss",
    "NotFound",
    "OptimizerChanged",
    "OutOfMemory",
    "OutOfRange",
    "Overloaded",
    "PacelineError",
    "PeerLost",
    "PoisonedCommand",
    "PositiveLogprob",
    "QuotaExceeded",
    "RankTooLarge",
    "ReaderStalled",
    "RequestIdReused",
    "RunNotFound",
    "RunStateLost",
    "SamplerExists",
    "SeqIdExpired",
    "SeqIdGap",
    "SeqIdReused",
    "SequenceTooLong",
    "ShuttingDown",
    "TimedOut",
    "TokenOutOfRange",
    "TooManyRuns",
    "TrainerUnavailable",
    "Unavailable",
    "UnknownField",
    "UnknownLoss",
    "UnreadableMessage",
    "Unsupported",
    "UpstreamUnavailable",
    "VersionExists",
    "VersionNotFound",
]


def _leaves(cls: type[PacelineError]) -> list[type[PacelineError]]:
    own = [cls] if "reason" in vars(cls) or cls is Internal else []
    return own + [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]


CATALOG: dict[str, type[PacelineError]] = {
    leaf.reason: leaf for leaf in _leaves(PacelineError) if leaf is not PacelineError
}
"""The class of every reason that can be sent."""
