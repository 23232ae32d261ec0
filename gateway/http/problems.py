"""Errors as HTTP responses: a status, and a body that both Tinker's SDK and OpenAI's client can read."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from gateway.http.openai_errors import is_openai, openai_body, openai_error
from paceline import errors
from paceline.errors import Code, PacelineError
from paceline.rpc.status import status_message

_STATUSES = {
    Code.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    Code.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    Code.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    Code.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.CANCELLED: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
    # Clients retry on 409 and 5xx, which would not help here.
    Code.ALREADY_EXISTS: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.FAILED_PRECONDITION: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.ABORTED: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.UNIMPLEMENTED: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.DATA_LOSS: HTTPStatus.UNPROCESSABLE_ENTITY,
}


def problem(error: PacelineError, path: str, status: int | None = None) -> JSONResponse:
    """Return the response for an error of a request to a path. A `status` overrides the error's."""
    is_large = isinstance(error, errors.MessageTooLarge)
    known: int | None = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if is_large else _STATUSES.get(error.code)
    if is_openai(path, error):
        known = openai_error(error).status or known
    code = status or known or HTTPStatus.INTERNAL_SERVER_ERROR
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if code == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(_body(error, path), code, headers)


def last_event(error: PacelineError, path: str) -> bytes:
    """Return the event that ends a stream of events with an error, in the form that responses of the path have."""
    return b"data: " + json.dumps(_body(error, path)).encode() + b"\n\n"


def _body(error: PacelineError, path: str) -> dict[str, Any]:
    """Return an error as JSON: `detail` for people and Tinker's SDK, `error` for other clients."""
    if is_openai(path, error):
        return openai_body(error)
    message = status_message(error)
    kind = "invalid_request_error" if is_fixable_by_caller(error) else "api_error"
    return {
        "detail": message,
        "error": {"message": message, "type": kind, "param": error.field or None, "code": error.reason},
    }


def is_fixable_by_caller(error: PacelineError) -> bool:
    """Whether the caller can fix the error by sending a different request, or by waiting."""
    return not isinstance(error, errors.Unavailable | errors.TimedOut | errors.Internal | errors.DataLoss)
