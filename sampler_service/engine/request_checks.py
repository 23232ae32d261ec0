"""Checks of a request that need no engine, so that an invalid request never reaches the model.

They cover its tokens and limits, and structured outputs: contradictory parameters, and keywords that are not enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from paceline.errors import (
    EmptyBatch,
    InvalidArgument,
    OutOfRange,
    SequenceTooLong,
    Unsupported,
    VersionNotFound,
)
from paceline.types import ModelInfo, SamplingParams
from paceline.types.training import check_vocabulary
from sampler_service.engine.protocol import Adapter

MAX_CONSTRAINT_LENGTH = 2**16
"""Longest schema or regular expression, in characters."""

MAX_NESTING = 128
"""Deepest nesting of objects and arrays in a schema, and of groups in a regular expression."""

MAX_COUNTED_PROPERTIES = 128
"""Most properties of an object that also bounds their number: xgrammar's work grows with their square."""

_NOT_ENFORCED = frozenset({"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "$dynamicRef"})
"""Keywords of JSON Schema that xgrammar ignores."""

_NEED_A_TYPE = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
     "format", "uniqueItems", "minItems", "maxItems", "minProperties", "maxProperties"}
)  # fmt: skip
"""Keywords that xgrammar ignores if the same schema names no type."""

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
_DEPTH = {"[": 1, "{": 1, "]": -1, "}": -1}
_GROUP = re.compile(r"\\.|\[(?:[^\]\\]|\\.)*+\]?|[()]", re.DOTALL)
"""What may hold a parenthesis of a regular expression: an escape, a class of characters, or itself."""

_SCHEMA = frozenset({"items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"})
_SCHEMA_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions"})


_TOO_MANY_GROUPS = f"nests groups too deeply; at most {MAX_NESTING} may lie in one another"


def check_tokens(info: ModelInfo, tokens: Sequence[int], field: str, reserved: int = 0) -> None:
    """Refuse token ids outside the vocabulary and sequences that leave less than `reserved` tokens of the context.

    Raises EmptyBatch, TokenOutOfRange, SequenceTooLong.
    """
    if not tokens:
        raise EmptyBatch("no tokens; send at least one", field=field)
    check_vocabulary(np.asarray(tokens), info.vocab_size, field)
    longest = info.max_context_length - reserved
    if len(tokens) > longest:
        raise SequenceTooLong(f"{len(tokens)} tokens; send at most {longest}", field=field)


def check_loaded(adapter: Adapter | None, loaded: Collection[int]) -> None:
    """Refuse an adapter that is not among the loaded ids. Raises VersionNotFound."""
    if adapter is not None and adapter.adapter_id not in loaded:
        raise VersionNotFound(f"{adapter.name} is not loaded; load it first", field="model")


def completion_budget(info: ModelInfo, prompt_length: int, params: SamplingParams) -> int:
    """Return how many tokens may be sampled: `max_tokens`, or the rest of the context if that is less.

    Raises OutOfRange if `max_tokens` is below 1 or `min_tokens` does not fit.
    """
    left = info.max_context_length - prompt_length
    budget = left if params.max_tokens is None else min(left, params.max_tokens)
    if budget < 1:
        raise OutOfRange(f"max_tokens is {params.max_tokens}; give at least 1", field="params.max_tokens")
    if params.min_tokens > budget:
        raise OutOfRange(f"min_tokens is {params.min_tokens}; at most {budget} fit", field="params.min_tokens")
    return budget


def refuse_constraint(params: SamplingParams) -> None:
    """Refuse structured outputs, for an engine without support for them. Raises Unsupported."""
    for name in ("json_schema", "regex"):
        if getattr(params, name):
            raise Unsupported("needs a sampler with the engine vllm", field=f"params.{name}")


def check_constraint(params: SamplingParams) -> None:
    """Check `json_schema` and `regex` together with the other parameters. Raises InvalidArgument or OutOfRange."""
    if not params.json_schema and not params.regex:
        return
    if params.json_schema and params.regex:
        raise InvalidArgument("cannot be set beside json_schema; send one of the two", field="params.regex")
    for name in ("json_schema", "regex"):
        check_length(getattr(params, name), f"params.{name}")
    check_ends([f"params.{name}" for name in ("ignore_eos", "min_tokens") if getattr(params, name)])
    if params.json_schema:
        check_schema(params.json_schema, "params.json_schema")
    if _groups(params.regex) > MAX_NESTING:
        raise InvalidArgument(_TOO_MANY_GROUPS, field="params.regex")


def check_ends(given: Iterable[str]) -> None:
    """Refuse fields that say where a completion ends, beside a constraint. Raises InvalidArgument."""
    for field in given:
        raise InvalidArgument("cannot be set beside a constraint, which says where a completion ends", field=field)


def check_length(text: str, field: str) -> None:
    """Refuse a constraint that is too long. Raises OutOfRange."""
    if len(text) > MAX_CONSTRAINT_LENGTH:
        message = f"takes at most {MAX_CONSTRAINT_LENGTH} characters"
        raise OutOfRange.of_length(text, MAX_CONSTRAINT_LENGTH, message, field)


def check_tag(text: str, field: str) -> None:
    """Check the size of a structural tag, which vLLM makes from tools and their schemas.

    Raises OutOfRange, InvalidArgument.
    """
    check_length(text, field)
    _check_nesting(text, field)
    parts = [json.loads(text)]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            _check_size(part, field)
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def check_schema(text: str, field: str) -> None:
    """Refuse a JSON Schema of which a part would not be enforced. Raises InvalidArgument, OutOfRange."""
    check_length(text, field)
    _check_nesting(text, field)
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidArgument("is not JSON", field=field) from error
    if not isinstance(schema, dict):
        raise InvalidArgument("must be a JSON object", field=field)
    for part in _subschemas(schema):
        _check_keywords(part, field)


def _check_nesting(text: str, field: str) -> None:
    # Parsers fail at depths that differ by version, and some crash the process, so the depth is checked first.
    if _nesting(text) > MAX_NESTING:
        message = f"is nested too deeply; at most {MAX_NESTING} objects and arrays may lie in one another"
        raise InvalidArgument(message, field=field)


def _nesting(text: str) -> int:
    """Return the nesting depth of brackets outside strings. The text need not be valid JSON."""
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += _DEPTH.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _groups(expression: str) -> int:
    """Return the nesting depth of the groups of a regular expression, which need not be valid."""
    depth = deepest = 0
    for found in _GROUP.finditer(expression):
        depth += (found[0] == "(") - (found[0] == ")")
        deepest = max(deepest, depth)
    return deepest


def _check_size(schema: dict[str, Any], field: str) -> None:
    """Refuse what takes xgrammar minutes and gigabytes, or more of the stack than there is."""
    expressions = [schema.get("pattern"), *_map(schema, "patternProperties")]
    if any(_groups(each) > MAX_NESTING for each in expressions if isinstance(each, str)):
        raise InvalidArgument(_TOO_MANY_GROUPS, field=field)
    counting = {"minProperties", "maxProperties"} & schema.keys()
    if counting and len(_map(schema, "properties")) > MAX_COUNTED_PROPERTIES:
        message = f"has {min(counting)} beside more than {MAX_COUNTED_PROPERTIES} properties; leave it out"
        raise InvalidArgument(message, field=field)


def _check_keywords(schema: dict[str, Any], field: str) -> None:
    _check_size(schema, field)
    if ignored := _NOT_ENFORCED & schema.keys():
        raise InvalidArgument(f"has {min(ignored)}, which is not enforced; leave it out", field=field)
    if "type" not in schema and (ignored := _NEED_A_TYPE & schema.keys()):
        message = f"has {min(ignored)} without a type, which is not enforced; give the type"
        raise InvalidArgument(message, field=field)
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        message = "has a $ref that is not a path within the schema, such as #/$defs/name"
        raise InvalidArgument(message, field=field)


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


def _map(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}
