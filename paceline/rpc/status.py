"""Errors on the wire: `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo in the trailers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from paceline import errors
from paceline.errors import CATALOG, Code, PacelineError

DOMAIN = "paceline"
DETAILS_KEY = "grpc-status-details-bin"

_MAX_MESSAGE, _MAX_FIELD, _MAX_METADATA = 768, 128, 1024
"""Most bytes of an error's texts, which are sent three times in the trailers; peers accept 8 KiB of trailers in all."""

ABORT_SECONDS = 1.0

STATUS_CODES: dict[int, grpc.StatusCode] = {status.value[0]: status for status in grpc.StatusCode}
_FALLBACKS: dict[int, type[PacelineError]] = {
    Code.CANCELLED: errors.Cancelled,
    Code.INVALID_ARGUMENT: errors.InvalidArgument,
    Code.DEADLINE_EXCEEDED: errors.TimedOut,
    Code.RESOURCE_EXHAUSTED: errors.MessageTooLarge,
    Code.UNIMPLEMENTED: errors.Unsupported,
    Code.UNAVAILABLE: errors.UpstreamUnavailable,
    Code.UNAUTHENTICATED: errors.InvalidApiKey,
}
"""Classes for errors that gRPC itself raises, which carry no ErrorInfo."""
_SIZE = re.compile("larger than max|metadata size")
"""In what gRPC says of messages and metadata that are too large, at either end."""


def status_code(error: PacelineError) -> grpc.StatusCode:
    """Return the status code of an error."""
    return STATUS_CODES[error.code]


def status_details(error: PacelineError) -> bytes:
    """Return the serialised `google.rpc.Status` of an error."""
    status = status_pb2.Status(code=code_pb2.Code.ValueType(error.code.value), message=status_message(error))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_fitting(error.metadata))
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clip(error.field, _MAX_FIELD), description=_clip(error.message, _MAX_MESSAGE)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return bytes(status.SerializeToString())


def status_message(error: PacelineError) -> str:
    """Return the text of an error, clipped because part of it may come from the caller, at any length."""
    message = _clip(error.message, _MAX_MESSAGE)
    return f"{_clip(error.field, _MAX_FIELD)}: {message}" if error.field else message


def _clip(text: str, most: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded.decode() if len(encoded) <= most else encoded[: most - 3].decode("utf-8", "ignore") + "..."


def _fitting(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the first entries that fit. They come from the service and are short."""
    left, kept = _MAX_METADATA, {}
    for name, value in metadata.items():
        left -= len(name.encode()) + len(value.encode())
        if left < 0:
            break
        kept[name] = value
    return kept


class StatusNotSentError(grpc.aio.AbortError):
    """A call was ended with an error that is still to be sent."""


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PacelineError) -> None:
    """End a call with an error. Raises `grpc.aio.AbortError`.

    The error follows the messages written before. A caller that has yet to read those receives both when it does; the
    handler does not wait for that and raises StatusNotSentError.
    """
    try:
        async with asyncio.timeout(ABORT_SECONDS):
            await context.abort(
                status_code(error), status_message(error), trailing_metadata=((DETAILS_KEY, status_details(error)),)
            )
    except TimeoutError:
        raise StatusNotSentError(error.reason) from error


def error_from_rpc(failure: grpc.aio.AioRpcError) -> PacelineError:
    """Return the error of a failed call: the one that the server raised, or the nearest class for gRPC's own.

    A CANCELLED of gRPC's own comes from a server that stops, or that dropped a call unread because too many wait: a
    caller that cancels a call gets asyncio.CancelledError instead. A RESOURCE_EXHAUSTED of gRPC's own is about a size,
    or a call that was not read either.
    """
    if (raw := _details_of(failure)) is not None:
        return error_from_details(raw, failure.details() or "")
    if failure.code() is grpc.StatusCode.CANCELLED:
        return errors.UpstreamUnavailable("the server stopped, or dropped the call unread because too many wait")
    if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not _SIZE.search(failure.details() or ""):
        return errors.Overloaded(failure.details() or "the server has too many calls")
    cls = _FALLBACKS.get(failure.code().value[0], errors.Internal)
    return cls(failure.details() or failure.code().name)


def is_from_grpc(failure: grpc.aio.AioRpcError) -> bool:
    """Return whether a call failed by gRPC itself (a lost connection, the caller's timeout) and not by the service."""
    return _details_of(failure) is None


def _details_of(failure: grpc.aio.AioRpcError) -> bytes | None:
    """Return the serialised `google.rpc.Status` that the service sent; None if it sent none."""
    found = (value for key, value in failure.trailing_metadata() or () if key == DETAILS_KEY)
    raw = next(found, None)
    return raw if isinstance(raw, bytes) else None


def error_from_details(raw: bytes, message: str) -> PacelineError:
    """Rebuild an error from a serialised `google.rpc.Status`."""
    status = status_pb2.Status.FromString(raw)
    info, field, retry_after = error_details_pb2.ErrorInfo(), "", None
    for detail in status.details:
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field, message = bad_request.field_violations[0].field, bad_request.field_violations[0].description
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            detail.Unpack(info)
    cls = CATALOG.get(info.reason) or _FALLBACKS.get(status.code, errors.Internal)
    return cls(message, field=field, metadata=dict(info.metadata), retry_after=retry_after)
