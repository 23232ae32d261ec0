"""Errors as fields of messages."""

from __future__ import annotations

from paceline.errors import CATALOG, Internal, PacelineError
from paceline.types.v1 import error_pb2 as pb


def error_to_proto(error: PacelineError) -> pb.Error:
    """Encode an error."""
    message = pb.Error(
        code=error.code.value, reason=error.reason, message=error.message, field=error.field, metadata=error.metadata
    )
    if error.retry_after is not None:
        message.retry_after_seconds = error.retry_after
    return message


def error_from_proto(message: pb.Error) -> PacelineError:
    """Decode an error; one with a reason that this release does not know becomes Internal."""
    cls = CATALOG.get(message.reason, Internal)
    retry_after = message.retry_after_seconds if message.HasField("retry_after_seconds") else None
    return cls(message.message, field=message.field, metadata=dict(message.metadata), retry_after=retry_after)
