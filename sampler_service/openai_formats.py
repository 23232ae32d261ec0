"""Checks what a body of OpenAI's API says of the form of its answer: constraints, and options of its stream."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline import errors
from sampler_service.engine.request_checks import check_ends

_FORMATS = ("text", "json_object", "json_schema")
_CONSTRAINTS: dict[str, tuple[Any, str]] = {
    "json": (dict | str, "a JSON Schema"),
    "regex": (str, "a regular expression"),
    "choice": (list, "a list of texts"),
    "json_object": (bool, "true"),
}
"""Constraints of `structured_outputs`, and their types."""
_SCHEMA_FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("name", str, "a name"),
    ("description", str, "text"),
    ("schema", dict, "a JSON Schema"),
    ("strict", bool, "true or false"),
)
"""Fields of the `json_schema` of a response's format."""
_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})


def check_format(given: Mapping[str, Any]) -> None:
    """Check that constraints on an answer are of a kind that is enforced, and that nothing contradicts them.

    Raises InvalidArgument, MissingField, UnknownField, EmptyBatch.
    """
    constraint, is_formatted = given.get("structured_outputs"), _read_format(given.get("response_format"))
    if constraint is not None:
        _check_constraint_kind(constraint)
    if constraint is not None and is_formatted:
        message = "cannot be set beside response_format; send one of the two"
        raise errors.InvalidArgument(message, field="structured_outputs")
    if constraint is not None or is_formatted or _holds_calls(given):
        check_ends(name for name in ("ignore_eos", "min_tokens") if given.get(name))


def check_stream(given: Mapping[str, Any]) -> None:
    """Check the options of a stream. Raises InvalidArgument, UnknownField."""
    options = given.get("stream_options")
    if options is None:
        return
    _check_object(options, "stream_options", _STREAM_OPTIONS)
    for name, value in options.items():
        if not isinstance(value, bool | None):
            raise errors.InvalidArgument.must_be("true or false", f"stream_options.{name}")
    if not given.get("stream"):
        raise errors.InvalidArgument("is only for streams; leave it out", field="stream_options")


def _read_format(form: Any) -> bool:
    """Check a `response_format`; return whether it constrains the response."""
    if form is None:
        return False
    _check_object(form, "response_format", {"type", "json_schema"})
    if form.get("type") is None:
        raise errors.MissingField(f"is not set; give one of {', '.join(_FORMATS)}", field="response_format.type")
    if form["type"] not in _FORMATS:
        raise errors.InvalidArgument(f"must have one of the types {', '.join(_FORMATS)}", field="response_format.type")
    schema = form.get("json_schema")
    if form["type"] == "json_schema":
        _check_schema_of_format(schema)
    elif schema is not None:
        raise errors.InvalidArgument("is only for the type json_schema", field="response_format.json_schema")
    return bool(form["type"] != "text")


def _check_schema_of_format(given: Any) -> None:
    field = "response_format.json_schema"
    if given is None:
        raise errors.MissingField("is not set; give the name and the schema", field=field)
    _check_object(given, field, {"name", "description", "schema", "strict"})
    for name, kind, wanted in _SCHEMA_FIELDS:
        value = given.get(name)
        if value is None and name in {"name", "schema"}:
            raise errors.MissingField(f"is not set; give {wanted}", field=f"{field}.{name}")
        if not isinstance(value, kind | None):
            raise errors.InvalidArgument.must_be(wanted, f"{field}.{name}")


def _check_constraint_kind(given: Any) -> None:
    """Check that `structured_outputs` has one constraint, of its type."""
    field = "structured_outputs"
    _check_object(given, field, _CONSTRAINTS.keys())
    kinds = [name for name, value in given.items() if value is not None]
    if len(kinds) != 1:
        raise errors.InvalidArgument(f"must have one of {', '.join(_CONSTRAINTS)}, and only one", field=field)
    value, (kind, wanted) = given[kinds[0]], _CONSTRAINTS[kinds[0]]
    if not isinstance(value, kind):
        raise errors.InvalidArgument.must_be(wanted, f"{field}.{kinds[0]}")
    if value is False:
        raise errors.InvalidArgument("must be true; leave it out for no constraint", field=f"{field}.{kinds[0]}")
    if value == []:
        raise errors.EmptyBatch(f"must be {wanted}, at least one", field=f"{field}.{kinds[0]}")
    if isinstance(value, list) and not all(isinstance(text, str) for text in value):
        raise errors.InvalidArgument.must_be(wanted, f"{field}.{kinds[0]}")


def _holds_calls(given: Mapping[str, Any]) -> bool:
    """Whether a request's calls are constrained: demanded, of tools that are strict, or of a bounded number."""
    choice, tools = given.get("tool_choice"), given.get("tools")
    if choice not in (None, "none", "auto"):
        return True
    if not isinstance(tools, list) or choice == "none":
        return False
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    is_strict = any(isinstance(function, dict) and function.get("strict") is True for function in functions)
    return is_strict or given.get("parallel_tool_calls") is False


def _check_object(given: Any, field: str, known: Collection[str]) -> None:
    if not isinstance(given, dict):
        raise errors.InvalidArgument.must_be("an object", field)
    for name, value in given.items():
        if name not in known and value is not None:
            raise errors.UnknownField("is not served; leave it out", field=f"{field}.{name[:80]}")
