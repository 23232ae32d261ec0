"""The service cannot or will not answer: limits, identity, availability, damage."""

from __future__ import annotations

from paceline.errors.base import Code, PacelineError


class Exhausted(PacelineError):
    """A limit was reached."""

    code = Code.RESOURCE_EXHAUSTED


class Overloaded(Exhausted):
    """More work than the service takes now."""

    reason = "OVERLOADED"
    default_retry_after = 1.0


class QuotaExceeded(Exhausted):
    """The tenant has as much of something as it may, or would have more.

    `metadata` says `quota` (which; WhoAmI lists them), `used` and `limit`. With `retry_after` waiting is enough; else
    something must be deleted, or the operator raises the limit.
    """

    reason = "QUOTA_EXCEEDED"


class TooManyRuns(QuotaExceeded):
    """The tenant has as many runs as it may."""

    reason = "TOO_MANY_RUNS"


class MessageTooLarge(Exhausted):
    """The message is larger than the service takes."""

    reason = "MESSAGE_TOO_LARGE"


class OutOfMemory(Exhausted):
    """The engine ran out of memory.

    Of a sequence that does not fit, `metadata["tokens"]` is its length and `metadata["fitting_tokens"]` one that would.
    """

    reason = "OUT_OF_MEMORY"


class DiskFull(Exhausted):
    """The checkpoint volume is full."""

    reason = "DISK_FULL"


class ReaderStalled(Exhausted):
    """Whoever read a stream stopped, or left too much of it unread; what the stream held was freed."""

    reason = "READER_STALLED"


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


class PeerLost(Unavailable):
    """The process group of trainer and samplers lost a member, or not all came; another one is being made."""

    reason = "PEER_LOST"


class BaseUnavailable(Unavailable):
    """The sampler that lends the trainer its base weights is away."""

    reason = "BASE_UNAVAILABLE"


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
    """No such method, or not for this kind of run or model."""

    code = Code.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"
