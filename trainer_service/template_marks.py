"""Finds what a chat template ignores: a copy of a conversation whose every text is a mark of its own.

A field whose mark is missing in the rendered copy would be accepted and dropped. Marks survive what templates do to
texts (trimming, escaping, JSON), and cannot occur in the template itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import errors
from paceline.chat.messages import ASSISTANT, Message

_THOUGHT = re.compile(r"(\s*</?think>\s*)")
_TOOLS = -1
_IGNORED = "is ignored by the model's chat template; leave it out"
_UNREASONED = "is ignored by the model's chat template under every name; leave it out, or write it into content"
_UNLINKED = (
    "is not written by the model's chat template, and is not the id of the next call without a result; send results in "
    "the order of their calls"
)
_MISNAMED = "is not written by the model's chat template, and is not the name in the call; leave it out"


@dataclass(frozen=True, slots=True)
class _Mark:
    text: str
    field: str
    message: int
    """Index of the message, or _TOOLS."""
    problem: str
    """What is wrong if the template does not write it."""


@dataclass(slots=True)
class _AnsweredCalls:
    """The calls of an assistant's message, and how many of them have results."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0

    def answer(self, message: Message) -> tuple[bool, bool]:
        """Return whether a result's id, and its name, are those of the next call without a result."""
        call = self.calls[self.answered] if self.answered < len(self.calls) else {}
        self.answered += 1
        is_linked = "id" in call and message.get("tool_call_id") == call["id"]
        return is_linked, bool(call) and message.get("name") == call["function"]["name"]


@dataclass(frozen=True, slots=True)
class MarkedConversation:
    """Messages and tools made of marks."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    marks: list[_Mark]

    def check(self, first: int, last: int, text: str) -> None:
        """Check that a rendered text has the marks of messages `first` to `last`, and those of the tools from 0.

        Raises Unsupported with the field of one that is missing.
        """
        low = _TOOLS if first == 0 else first
        for each in self.marks:
            if low <= each.message <= last and each.text not in text:
                raise errors.Unsupported(each.problem, field=each.field)

    def split(self, message: int, text: str) -> tuple[str, str]:
        """Return the part of a text from a message's first mark to its last, and what follows it."""
        own = [each.text for each in self.marks if each.message == message]
        starts = [text.rfind(mark) for mark in own if mark in text]
        if not starts:
            return "", text
        end = max(text.rfind(mark) + len(mark) for mark in own if mark in text)
        return text[min(starts) : end], text[end:]


class _Marker:
    """Makes marks. Equal ids, and equal names, get equal marks, since templates look one up by the other."""

    def __init__(self) -> None:
        self.marks: list[_Mark] = []
        self._message = _TOOLS
        self._shared: dict[tuple[str, str], str] = {}
        self._count = 0

    def tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if tools is None:
            return None
        return [self._tool(tool["function"], f"tools[{index}]") for index, tool in enumerate(tools)]

    def message(self, index: int, message: Message, results: _AnsweredCalls) -> Message:
        self._message, field = index, f"messages[{index}]"
        marked = {**message, "content": self._content(message, f"{field}.content")}
        if message.get("reasoning"):
            marked["reasoning"] = self._new(f"{field}.reasoning", _UNREASONED)
        if "tool_calls" in message:
            marked["tool_calls"] = [
                self._call(call, f"{field}.tool_calls[{number}]") for number, call in enumerate(message["tool_calls"])
            ]
        is_linked, is_named = results.answer(message) if message["role"] in {"tool", "function"} else (False, False)
        if "tool_call_id" in message:
            problem = "" if is_linked else _UNLINKED
            marked["tool_call_id"] = self._same("id", message["tool_call_id"], f"{field}.tool_call_id", problem)
        if "name" in message:
            problem = "" if is_named else _MISNAMED if message["role"] == "tool" else _IGNORED
            is_result = message["role"] in {"tool", "function"}
            marked["name"] = (
                self._same("name", message["name"], f"{field}.name", problem)
                if is_result
                else self._new(f"{field}.name")
            )
        return marked

    def _content(self, message: Message, field: str) -> str | list[dict[str, str]] | None:
        content = message["content"]
        if isinstance(content, list):
            return [{"type": "text", "text": self._text(part["text"], message["role"], field)} for part in content]
        return None if content is None else self._text(content, message["role"], field)

    def _text(self, text: str, role: str, field: str) -> str:
        """Mark a text; in the assistant's, what is inside a thought and outside of it has marks of its own."""
        pieces = _THOUGHT.split(text) if role == ASSISTANT else [text]
        return "".join(
            piece if index % 2 or not piece.strip() else self._new(field) for index, piece in enumerate(pieces)
        )

    def _call(self, call: dict[str, Any], field: str) -> dict[str, Any]:
        function, field_of_function = call["function"], f"{field}.function"
        name = self._same("name", function["name"], f"{field_of_function}.name", _IGNORED)
        arguments = self._value(function["arguments"], f"{field_of_function}.arguments")
        marked = {**call, "function": {"name": name, "arguments": arguments}}
        if "id" in call:  # It has done its work if the results are linked.
            marked["id"] = self._same("id", call["id"], f"{field}.id", "")
        return marked

    def _value(self, value: Any, field: str) -> Any:
        if isinstance(value, dict):
            return {self._new(field): self._value(part, field) for part in value.values()}
        if isinstance(value, list):
            return [self._value(part, field) for part in value]
        return self._new(field)

    def _tool(self, function: dict[str, Any], field: str) -> dict[str, Any]:
        field = f"{field}.function"
        marked = {**function, "name": self._new(f"{field}.name")}
        if function["description"]:
            marked["description"] = self._new(f"{field}.description")
        parameters = function["parameters"]
        properties = parameters.get("properties") if parameters else None
        if isinstance(properties, dict):
            names = {name: self._new(f"{field}.parameters.properties.{name[:80]}") for name in properties}
            required = parameters.get("required")
            changed = {"required": [names.get(name, name) for name in required]} if isinstance(required, list) else {}
            renamed = {
                names[name]: self._described(value, f"{field}.parameters.properties.{name[:80]}")
                for name, value in properties.items()
            }
            marked["parameters"] = {**parameters, "properties": renamed, **changed}
        return {"type": "function", "function": marked}

    def _described(self, schema: Any, field: str) -> Any:
        """Mark the description of a parameter, if it has one."""
        if not isinstance(schema, dict) or not isinstance(schema.get("description"), str) or not schema["description"]:
            return schema
        return {**schema, "description": self._new(f"{field}.description")}

    def _same(self, kind: str, value: str, field: str, problem: str) -> str:
        """Return the mark of an id or a name; no `problem` means that the template need not write it."""
        if (kind, value) not in self._shared:
            self._shared[kind, value] = self._next()
        text = self._shared[kind, value]
        if problem:
            self.marks.append(_Mark(text, field, self._message, problem))
        return text

    def _new(self, field: str, problem: str = _IGNORED) -> str:
        text = self._next()
        self.marks.append(_Mark(text, field, self._message, problem))
        return text

    def _next(self) -> str:
        """Return a new text: nine letters and digits, since templates of Mistral's models want such ids."""
        self._count += 1
        return f"zq{self._count:07d}"


def mark(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> MarkedConversation:
    """Return a copy of a conversation that has a mark in place of each text.

    The ids of calls and their results only connect the two: a template that writes none keeps the connection if results
    come in the order of their calls. The same goes for the name of a result.
    """
    marker, results, marked = _Marker(), _AnsweredCalls(), list[Message]()
    marked_tools = marker.tools(tools)
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            results = _AnsweredCalls(message["tool_calls"])
        marked.append(marker.message(index, message, results))
    return MarkedConversation(marked, marked_tools, marker.marks)
