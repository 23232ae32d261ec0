"""Errors as OpenAI's API has them: one table from Paceline's classes to OpenAI's codes, types and statuses."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from paceline import errors
from paceline.errors import PacelineError
from paceline.rpc.status import status_message

_PATHS = re.compile(r"(/weights/[^/]+)?/v1/(models(/.*)?|completions|chat/completions)/?")
_BELOW = re.compile(r"(/weights/[^/]+)?/v1(/.*)?")


class UnknownUrl(errors.Unsupported):
    """No API has the path of a request."""


class WrongMethod(errors.Unsupported):
    """The path of a request takes other methods."""


@dataclass(frozen=True, slots=True)
class OpenAiError:
    """What OpenAI's clients tell errors apart by."""

    code: str | None
    """None where OpenAI has no code for it."""
    kind: str = "invalid_request_error"
    status: int | None = None
    """None: the same as in all APIs."""


_TABLE: dict[type[PacelineError], OpenAiError] = {
    PacelineError: OpenAiError(None),
    errors.InvalidArgument: OpenAiError("invalid_value"),
    errors.UnreadableMessage: OpenAiError(None),
    errors.MissingField: OpenAiError("missing_required_parameter"),
    errors.UnknownField: OpenAiError("unknown_parameter"),
    errors.EmptyBatch: OpenAiError("empty_array"),
    errors.SequenceTooLong: OpenAiError("context_length_exceeded"),
    errors.Unsupported: OpenAiError("unsupported_value", status=HTTPStatus.BAD_REQUEST),
    UnknownUrl: OpenAiError("unknown_url", status=HTTPStatus.NOT_FOUND),
    WrongMethod: OpenAiError("method_not_supported", status=HTTPStatus.METHOD_NOT_ALLOWED),
    errors.NotFound: OpenAiError("model_not_found"),
    errors.InvalidApiKey: OpenAiError("invalid_api_key"),
    errors.Overloaded: OpenAiError("rate_limit_exceeded", "requests"),
    errors.QuotaExceeded: OpenAiError("insufficient_quota", "insufficient_quota"),
    errors.Unavailable: OpenAiError(None, "server_error"),
    errors.TimedOut: OpenAiError(None, "server_error"),
    errors.DataLoss: OpenAiError(None, "server_error"),
    errors.Internal: OpenAiError(None, "server_error"),
}
"""A class that is missing here has the entry of its base. `openai_error` refines some of them."""

_KNOWN = frozenset(
    {"audio", "best_of", "function_call", "functions", "modalities", "moderation", "prediction",
     "prompt_cache_retention", "stream_options.include_obfuscation", "suffix", "verbosity", "web_search_options"}
)  # fmt: skip
"""Parameters of OpenAI's API that are not served."""
_PARAMETERS = re.compile(r"tools\[\d+\]\.function\.parameters")


def is_openai(path: str, error: PacelineError | None = None) -> bool:
    """Whether what is answered to a path, or an error of it, is for OpenAI's clients. Other APIs are below /v1, too."""
    return (_BELOW if isinstance(error, UnknownUrl) else _PATHS).fullmatch(path) is not None


def openai_error(error: PacelineError) -> OpenAiError:
    """Return what an error is for OpenAI's clients."""
    found = next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)
    code = found.code
    if isinstance(error, errors.QuotaExceeded) and error.retry_after is not None:
        kind = "tokens" if "tokens" in error.metadata.get("quota", "") else "requests"
        return OpenAiError("rate_limit_exceeded", kind)
    if isinstance(error, errors.UnknownField) and error.field in _KNOWN:
        code = "unsupported_parameter"
    elif isinstance(error, errors.InvalidArgument) and _PARAMETERS.fullmatch(error.field):
        code = "invalid_function_parameters"
    elif isinstance(error, errors.OutOfRange | errors.TokenOutOfRange):
        code = _length_code(error) or _range_code(error) or code
    elif "wanted" in error.metadata:
        code = "invalid_type"
    return replace(found, code=code)


def openai_body(error: PacelineError) -> dict[str, Any]:
    """Return an error as JSON: in `error` as OpenAI's clients know it, with Paceline's own `reason`."""
    known, message = openai_error(error), status_message(error)
    param = re.sub(r"^params\.|(?<=^model)\..*", "", error.field) or None
    return {
        "detail": message,
        "error": {
            "message": message,
            "type": known.kind,
            "param": param,
            "code": known.code,
            "reason": error.reason,
        },
    }


def _length_code(error: PacelineError) -> str:
    """Return OpenAI's code for a text or a list of a wrong length, by its metadata; empty if they are not given."""
    metadata = error.metadata
    if "length" not in metadata:
        return ""
    length, what = int(metadata["length"]), metadata["of"]
    return f"{what}_above_max_length" if length > int(metadata["maximum"]) else f"empty_{what}"


def _range_code(error: PacelineError) -> str:
    """Return OpenAI's code for a value out of range, by its metadata; empty if they are not given."""
    metadata = error.metadata
    if "value" not in metadata:
        return ""
    what = "decimal" if "." in metadata["maximum"] else "integer"
    is_above = float(metadata["value"]) >= float(metadata["maximum"])
    return f"{what}_above_max_value" if is_above else f"{what}_below_min_value"
