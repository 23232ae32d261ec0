"""The service cannot or will not answer: limits, identity, availability, damage."""

from __future__ import annotations

from paceline.errors.base import Code, PacelineError


class Exhausted(PacelineError):
    """A limit was reached."""

    code = Code.RESOURCE_EXHAUSTED


class Overloaded(Exhausted):
    """The service has more work than it accepts at present."""

    reason = "OVERLOADED"
    default_retry_after = 1.0


class QuotaExceeded(Exhausted):
    """The tenant is at a quota, or the call would exceed it.

    `metadata` holds `quota` (its name; WhoAmI lists them), `used` and `limit`. With `retry_after`, waiting is enough;
    otherwise something must be deleted, or the operator must raise the limit.
    """

    reason = "QUOTA_EXCEEDED"


class TooManyRuns(QuotaExceeded):
    """The tenant has the maximum number of runs."""

    reason = "TOO_MANY_RUNS"


class MessageTooLarge(Exhausted):
    """The message is larger than the service accepts."""

    reason = "MESSAGE_TOO_LARGE"


class OutOfMemory(Exhausted):
    """The engine ran out of memory.

    For a sequence that does not fit, `metadata["tokens"]` is its length and `metadata["fitting_tokens"]` a length that
    would fit.
    """

    reason = "OUT_OF_MEMORY"


class DiskFull(Exhausted):
    """The checkpoint volume is full."""

    reason = "DISK_FULL"


class ReaderStalled(Exhausted):
    """The reader of a stream stopped or left too much of it unread; the stream's resources were freed."""

    reason = "READER_STALLED"


class Denied(PacelineError):
    """The caller or the method is not allowed."""

    code = Code.PERMISSION_DENIED


class InvalidApiKey(Denied):
    """The API key is missing or unknown."""

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
    """The service cannot answer now; the same call may succeed shortly."""

    code = Code.UNAVAILABLE
    default_retry_after = 1.0


class EngineUnavailable(Unavailable):
    """The engine is restarting."""

    reason = "ENGINE_UNAVAILABLE"


class TrainerUnavailable(Unavailable):
    """The sampler cannot reach the trainer."""

    reason = "TRAINER_UNAVAILABLE"


class PeerLost(Unavailable):
    """The process group of trainer and samplers lost a member or was never complete; a new one is being made."""

    reason = "PEER_LOST"


class BaseUnavailable(Unavailable):
    """The sampler that lends its base weights to the trainer is not running."""

    reason = "BASE_UNAVAILABLE"


class UpstreamUnavailable(Unavailable):
    """The gateway cannot reach the service, or the client cannot reach the gateway."""

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
    """Samplers did not acknowledge the version in time; the version exists nevertheless."""

    reason = "ACK_TIMEOUT"


class Cancelled(PacelineError):
    """The caller cancelled the call."""

    code = Code.CANCELLED
    reason = "CANCELLED"


class Unsupported(PacelineError):
    """The method does not exist, or not for this kind of run or model."""

    code = Code.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"
