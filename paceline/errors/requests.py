"""The request is wrong: the same call will fail again."""

from __future__ import annotations

from paceline.errors.base import Code, PacelineError


class InvalidArgument(PacelineError):
    """A field has a value that no more specific class covers."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_FIELD"


class UnreadableMessage(InvalidArgument):
    """A message is missing, or its bytes are not one of the contract's."""

    reason = "UNREADABLE_MESSAGE"


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
