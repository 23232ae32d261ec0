"""The request is wrong: the same call will fail again."""

from __future__ import annotations

from paceline.errors.base import Code, PacelineError


class InvalidArgument(PacelineError):
    """A field has a value that no more specific class covers."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_FIELD"


class UnreadableMessage(InvalidArgument):
    """A message is missing, or its bytes do not parse as a message of the contract."""

    reason = "UNREADABLE_MESSAGE"


class MissingField(InvalidArgument):
    """A required field is not set."""

    reason = "MISSING_FIELD"


class UnknownField(InvalidArgument):
    """A loss setting, loss input or optimizer setting is not known."""

    reason = "UNKNOWN_FIELD"


class UnknownLoss(InvalidArgument):
    """The service does not offer this loss."""

    reason = "UNKNOWN_LOSS"


class EmptyBatch(InvalidArgument):
    """A batch holds no datum, or a datum no token."""

    reason = "EMPTY_BATCH"


class InvalidDtype(InvalidArgument):
    """The field does not accept the tensor's dtype."""

    reason = "INVALID_DTYPE"


class InvalidShape(InvalidArgument):
    """A tensor's shape or byte length does not fit."""

    reason = "INVALID_SHAPE"


class OutOfRange(InvalidArgument):
    """A number is outside its range."""

    reason = "OUT_OF_RANGE"


class TokenOutOfRange(InvalidArgument):
    """A token id is negative, or not below the vocabulary size."""

    reason = "TOKEN_OUT_OF_RANGE"


class NonFinite(InvalidArgument):
    """NaN or infinity where a finite number is required."""

    reason = "NON_FINITE"


class PositiveLogprob(InvalidArgument):
    """A log-probability above 0 at a counted position."""

    reason = "POSITIVE_LOGPROB"


class SequenceTooLong(InvalidArgument):
    """More tokens than the context length."""

    reason = "SEQUENCE_TOO_LONG"


class RankTooLarge(InvalidArgument):
    """The LoRA rank is above the maximum of the trainer or a sampler."""

    reason = "RANK_TOO_LARGE"


class InvalidName(InvalidArgument):
    """A name with characters that are not allowed."""

    reason = "INVALID_NAME"


class InvalidPath(InvalidArgument):
    """The path is not a checkpoint path."""

    reason = "INVALID_PATH"


class InvalidPageToken(InvalidArgument):
    """The page token was not returned by a list call."""

    reason = "INVALID_PAGE_TOKEN"
