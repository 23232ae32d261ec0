"""A chat's tools: checked, and completed so that vLLM can hold calls to their schemas.

Calls must follow the schemas of their arguments if the request demands a call (`tool_choice` required or a name), asks
for it (`strict`), or has vLLM bound the number of calls, for which it needs a grammar of them anyway. Otherwise the
model calls as it was trained to.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidArgument, InvalidName, Unsupported
from sampler_service.engine.request_checks import check_schema

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""Names that need no escapes in JSON, which the formats of some models cannot have."""
_WHOLE = frozenset({"stop", "tool_calls"})
"""Reasons why an answer ends that is not cut off."""
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
"""Parameters of a tool that names none. Without a schema, vLLM takes any JSON for the arguments."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a chat uses tools."""

    body: dict[str, Any]
    """The request's body, in which every tool has parameters."""
    demands: str = ""
    """The field that demands calls which match their schemas; empty if none does."""
    is_constrained: bool = False
    """Whether calls must follow their schemas."""


class DemandedCalls:
    """Checks that an answer has the calls that its request demands.

    What was sampled must follow the schemas, but a parser may not find it: a text within the arguments can be what
    marks the end of a call in the model's format.
    """

    def __init__(self) -> None:
        self._arguments: dict[int, dict[int, str]] = {}
        """The arguments of calls so far, by choice and call."""

    def see(self, part: bytes) -> None:
        """Check the choices that end in a part of an answer, or in a whole one. Raises Unsupported."""
        for choice in json.loads(part).get("choices", ()):
            calls = self._arguments.setdefault(choice["index"], {})
            said = choice.get("message") or choice.get("delta") or {}
            for position, call in enumerate(said.get("tool_calls") or ()):
                at = call.get("index", position)
                calls[at] = calls.get(at, "") + (call["function"].get("arguments") or "")
            if choice.get("finish_reason") in _WHOLE and not (calls and all(map(_is_object, calls.values()))):
                message = (
                    "demands a call, and its parser cannot read the one that was sampled: its arguments hold a mark "
                )
                raise Unsupported(f"{message}of the model's format; change the schema or the seed", field="tool_choice")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def tool_use(body: dict[str, Any]) -> ToolUse:
    """Check a chat's tools. Raises InvalidArgument, InvalidName."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not isinstance(tools, list) or choice == "none":
        return ToolUse(body)
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    completed = [
        {**tool, "function": {**function, "parameters": function.get("parameters") or _NOTHING}}
        for tool, function in zip(tools, functions, strict=True)
    ]
    demands = "tool_choice" if choice == "required" or isinstance(choice, dict) else ""
    if not demands and any(function.get("strict") is True for function in functions):
        demands = "tools"
    is_constrained = bool(demands) or body.get("parallel_tool_calls") is False
    if is_constrained:
        for index, tool in enumerate(completed):
            _check_parameters(tool["function"]["parameters"], f"tools[{index}].function.parameters")
    return ToolUse({**body, "tools": completed}, demands, is_constrained)


def _function(tool: Any, field: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise InvalidArgument('must be {"type": "function", "function": {...}}', field=field)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName("must have 1 to 128 letters, digits and characters of _-.:/", field=f"{field}.function.name")
    return function


def _check_parameters(parameters: Any, field: str) -> None:
    """Refuse a schema that is not enforced wholly, or that allows arguments other than an object."""
    if not isinstance(parameters, dict):
        raise InvalidArgument("must be a JSON Schema", field=field)
    check_schema(json.dumps(parameters), field)
    if not _is_of_objects(parameters, parameters, set()):
        raise InvalidArgument('must be a schema of objects: give it "type": "object"', field=field)


def _is_of_objects(schema: Any, root: dict[str, Any], seen: set[str]) -> bool:
    """Whether a schema allows nothing but objects."""
    if not isinstance(schema, dict):
        return False
    if isinstance(reference := schema.get("$ref"), str):
        found: Any = root
        for name in reference.removeprefix("#").split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return reference not in seen and _is_of_objects(found, root, seen | {reference})
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(name), list) and branches:
            return all(_is_of_objects(branch, root, seen) for branch in branches)
    return bool(schema.get("type", "object" if "properties" in schema else "") == "object")
