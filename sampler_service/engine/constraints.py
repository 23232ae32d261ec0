"""Checks of structured outputs that need no engine: contradictory parameters, and keywords that are not enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from paceline import errors
from paceline.types import SamplingParams

MAX_CONSTRAINT_LENGTH = 2**16
"""Longest schema or regular expression, in characters."""

MAX_NESTING = 128
"""Deepest nesting of objects and arrays in a schema."""

_NOT_ENFORCED = frozenset({"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "$dynamicRef"})
"""Keywords of JSON Schema that xgrammar ignores."""

_NEED_A_TYPE = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
     "format", "uniqueItems", "minItems", "maxItems", "minProperties", "maxProperties"}
)  # fmt: skip
"""Keywords that xgrammar ignores if the same schema names no type."""

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
_DEPTH = {"[": 1, "{": 1, "]": -1, "}": -1}

_SCHEMA = frozenset({"items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"})
_SCHEMA_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def check_constraint(params: SamplingParams) -> None:
    """Check `json_schema` and `regex` together with the other parameters. Raises InvalidArgument or OutOfRange."""
    if not params.json_schema and not params.regex:
        return
    if params.json_schema and params.regex:
        raise errors.InvalidArgument("takes no json_schema beside it; send one of the two", field="params.regex")
    for name in ("json_schema", "regex"):
        check_length(getattr(params, name), f"params.{name}")
    for name in ("ignore_eos", "min_tokens"):
        if getattr(params, name):
            raise errors.InvalidArgument(
                "cannot be set beside json_schema or regex, which say where a completion ends", field=f"params.{name}"
            )
    if params.json_schema:
        _check_schema(params.json_schema)


def check_length(text: str, field: str) -> None:
    """Refuse a constraint that is too long. Raises OutOfRange."""
    if len(text) > MAX_CONSTRAINT_LENGTH:
        raise errors.OutOfRange(f"takes at most {MAX_CONSTRAINT_LENGTH} characters", field=field)


def _check_schema(text: str) -> None:
    # Parsers fail at depths that differ by version, and some crash the process, so the depth is checked first.
    if _nesting(text) > MAX_NESTING:
        raise _refused(f"is nested too deeply; at most {MAX_NESTING} objects and arrays may lie in one another")
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise _refused("must be a JSON object")
        for part in _subschemas(schema):
            _check_keywords(part)
    except ValueError as error:
        raise _refused("is not JSON") from error


def _nesting(text: str) -> int:
    """Return the nesting depth of brackets outside strings. The text need not be valid JSON."""
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += _DEPTH.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _check_keywords(schema: dict[str, Any]) -> None:
    if ignored := _NOT_ENFORCED & schema.keys():
        raise _refused(f"has {min(ignored)}, which is not enforced; leave it out")
    if "type" not in schema and (ignored := _NEED_A_TYPE & schema.keys()):
        raise _refused(f"has {min(ignored)} without a type, which is not enforced; give the type")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refused("has a $ref that is no path within the schema, such as #/$defs/name")


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas inside it, but not enums and defaults, which are values."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        parts: list[Any] = []
        if key in _SCHEMA:
            parts = [value]
        elif key in _SCHEMA_LIST and isinstance(value, list):
            parts = value
        elif key in _SCHEMA_MAP and isinstance(value, dict):
            parts = list(value.values())
        for part in parts:
            yield from _subschemas(part)


def _refused(message: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(message, field="params.json_schema")
