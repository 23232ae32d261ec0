"""The one form in which messages and tools reach a chat template, in training as in serving.

vLLM changes messages again before it renders them. It leaves this form as it is, and `as_rendered` returns what its
renderer then gives to the template, so that a response is trained after the prompt that it will be sampled from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from paceline import errors

Message = dict[str, Any]
ASSISTANT = "assistant"
REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")
"""Names for a message's reasoning; all mean the first."""
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_NAMES})
TEMPLATE_KWARGS = "chat_template_kwargs"
"""The field for variables of a chat template, such as enable_thinking."""
_RENDERERS_OWN = frozenset({"chat_template", "tokenize"})
_SCALARS = (str, int, float, bool, type(None))
_ALWAYS_WITH_CONTENT = ("user", "system", "developer")
"""Roles whose messages have a text; the others may have tool calls instead."""
_PART_FIELDS = frozenset({"type", "text", "cache_control"})
"""`cache_control` is a hint that does not affect the response."""
_CALL_FIELDS = frozenset({"id", "type", "function", "index"})
_TOOL_FIELDS = frozenset({"type", "function"})
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_PROBE = ("paceline first part", "paceline second part")
_LISTS = ("'type': 'text'", '"type": "text"', '"type":"text"')
"""What a part looks like if it is written as it is."""


class ContentFormat(Enum):
    """What a chat template reads a message's content as. The values are vLLM's names."""

    TEXT = "string"
    PARTS = "openai"


def read_messages(messages: Any) -> list[Message]:
    """Check messages in the shape of OpenAI's chat API, and return them in one form.

    Content is text, a list of text parts, or None. Reasoning is in `reasoning`, whichever name it came by. A call's
    arguments are an object. Fields that are null or an empty list are left out, and all others that no template would
    get are refused: nothing is accepted and dropped. Nothing is fetched for a caller, so content is text only.

    Raises InvalidArgument, MissingField, UnknownField, Unsupported.
    """
    _check_list(messages, "messages", "a list of messages, at least one")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Check tools in the shape of OpenAI's chat API, and return them as templates get them: with every field.

    Raises InvalidArgument, UnknownField.
    """
    if tools is None:
        return None
    _check_list(tools, "tools", "a list of tools, at least one; leave it out for none")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def read_template_kwargs(given: Any) -> dict[str, Any]:
    """Check variables of a chat template: names, and scalars as values. Raises InvalidArgument, UnknownField."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise errors.InvalidArgument.must_be("an object", TEMPLATE_KWARGS)
    for name, value in given.items():
        if name in _RENDERERS_OWN or not isinstance(value, _SCALARS):
            raise errors.UnknownField("is not served; leave it out", field=f"{TEMPLATE_KWARGS}.{name[:80]}")
    return given


def content_format(render: Callable[[list[Message]], str]) -> ContentFormat:
    """Return the format that a chat template reads; `render` renders messages with it.

    A template that reads parts writes their texts. One that does not fails, or writes the list itself.
    """
    parts = [{"type": "text", "text": text} for text in _PROBE]
    try:
        text = render([{"role": "user", "content": parts}])
    except Exception:  # a template is code that comes with the model
        return ContentFormat.TEXT
    reads_parts = all(part in text for part in _PROBE) and not any(each in text for each in _LISTS)
    return ContentFormat.PARTS if reads_parts else ContentFormat.TEXT


def as_rendered(messages: Sequence[Message], template: str, form: ContentFormat) -> list[Message]:
    """Return messages, as `read_messages` returned them, as vLLM's renderer gives them to a template."""
    given = [_as_rendered(message, form) for message in messages]
    knows_developers = "'developer'" in template or '"developer"' in template
    if knows_developers or all(message["role"] != "developer" for message in given):
        return given
    return _with_one_system([{**message, "role": _role_without_developer(message)} for message in given])


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have their arguments as JSON text, as OpenAI's API has them."""
    return [
        {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def texts_of(content: str | list[dict[str, str]] | None) -> list[str]:
    """Return the texts of a message's content that are not empty."""
    parts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    return [text for text in parts if text]


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, dict):
        raise errors.InvalidArgument.must_be("an object", field)
    given = {name: value for name, value in message.items() if value is not None and value != []}
    for name in given.keys() - MESSAGE_FIELDS:
        raise errors.UnknownField("is not known; leave it out", field=f"{field}.{name[:80]}")
    role = given.get("role")
    if role is None or role == "":
        raise errors.MissingField("is not set; give a name, such as user or assistant", field=f"{field}.role")
    if not isinstance(role, str):
        raise errors.InvalidArgument.must_be("a name, such as user or assistant", f"{field}.role")
    if role in _ALWAYS_WITH_CONTENT and "content" not in given:
        raise errors.MissingField("is not set; give the message's text", field=f"{field}.content")
    read: Message = {"role": role, "content": _content(given.get("content"), f"{field}.content")}
    reasoning = _reasoning(given, field)
    if reasoning is not None:
        read["reasoning"] = reasoning
    if "tool_calls" in given:
        read["content"] = read["content"] or None  # An empty text beside calls is no part of its own.
        read["tool_calls"] = list(_calls(given["tool_calls"], f"{field}.tool_calls"))
    for name in ("tool_call_id", "name"):
        if name in given:
            read[name] = _text(given[name], f"{field}.{name}")
    _check_role_has(read, given, field)
    return read


def _check_role_has(read: Message, given: Mapping[str, Any], field: str) -> None:
    """Check that no field is given that is passed on for another role only."""
    owners = {"tool_calls": ASSISTANT, "tool_call_id": "tool"} | dict.fromkeys(REASONING_NAMES, ASSISTANT)
    for name, owner in owners.items():
        if name in given and read["role"] != owner:
            raise errors.InvalidArgument(f"belongs to messages of role {owner} only", field=f"{field}.{name}")


def _content(content: Any, field: str) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.InvalidArgument.must_be("text, or a list of text parts", field)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise errors.Unsupported("accepts only text", field=field)
        for name in part.keys() - _PART_FIELDS:
            raise errors.UnknownField("is not known in a part; leave it out", field=f"{field}.{name[:80]}")
    return [{"type": "text", "text": part["text"]} for part in content]


def _reasoning(given: Mapping[str, Any], field: str) -> str | None:
    names = [name for name in REASONING_NAMES if name in given]
    values = [_text(given[name], f"{field}.{name}") for name in names]
    if len(set(values)) > 1:
        raise errors.InvalidArgument(f"differs from {names[0]}, which means the same", field=f"{field}.{names[-1]}")
    return values[0] if values else None


def _calls(calls: Any, field: str) -> Iterator[dict[str, Any]]:
    if not isinstance(calls, list):
        raise errors.InvalidArgument.must_be("a list of calls", field)
    for index, call in enumerate(calls):
        yield _call(call, index, f"{field}[{index}]")


def _call(call: Any, index: int, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _no_function(call, "a call of type function, with its function", field)
    for name in call.keys() - _CALL_FIELDS:
        raise errors.UnknownField("is not known in a call; leave it out", field=f"{field}.{name[:80]}")
    if call.get("index", index) not in (index, None):
        raise errors.InvalidArgument("must be the call's position; leave it out", field=f"{field}.index")
    for name in function.keys() - {"name", "arguments"}:
        raise errors.UnknownField("is not known in a call; leave it out", field=f"{field}.function.{name[:80]}")
    found = {"name": _text(function.get("name"), f"{field}.function.name")}
    if not found["name"]:
        raise errors.MissingField("is not set; name the function", field=f"{field}.function.name")
    read = {} if call.get("id") is None else {"id": _text(call["id"], f"{field}.id")}
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    return {**read, "type": "function", "function": {**found, "arguments": arguments}}


def _arguments(given: Any, field: str) -> dict[str, Any]:
    """Return a call's arguments; None and an empty text mean that there are none."""
    if given is None or given == "":
        return {}
    parsed = given
    if isinstance(given, str):
        try:
            parsed = json.loads(given, object_pairs_hook=_distinct)
        except _AmbiguousError as problem:
            raise errors.InvalidArgument(str(problem), field=field) from problem
        except (ValueError, RecursionError) as problem:
            message = "is not JSON; send an object of arguments, or a broken call as the text of content"
            raise errors.InvalidArgument(message, field=field) from problem
    if not isinstance(parsed, dict):
        raise errors.InvalidArgument.must_be("an object of arguments, or its JSON text", field)
    try:
        json.dumps(parsed, allow_nan=False)
    except ValueError as problem:
        raise errors.NonFinite("holds a number that is not finite, which JSON cannot write", field=field) from problem
    return parsed


class _AmbiguousError(ValueError):
    """JSON of which readers keep only a part."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise _AmbiguousError(f"has {name[:80]!r} twice, of which readers keep one; leave out the other")
        found[name] = value
    return found


def _tool(tool: Any, field: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise _no_function(tool, "a tool of type function, with its function", field)
    for name in tool.keys() - _TOOL_FIELDS:
        raise errors.UnknownField("is not known in a tool; leave it out", field=f"{field}.{name[:80]}")
    for name in function.keys() - set(_FUNCTION_FIELDS):
        raise errors.UnknownField("is not known in a tool; leave it out", field=f"{field}.function.{name[:80]}")
    name, description, parameters, strict = (function.get(field) for field in _FUNCTION_FIELDS)
    if not isinstance(name, str) or not name:
        raise errors.MissingField("is not set; name the function", field=f"{field}.function.name")
    if not isinstance(description, str | None):
        raise errors.InvalidArgument.must_be("text", f"{field}.function.description")
    if not isinstance(parameters, dict | None):
        raise errors.InvalidArgument.must_be("a JSON Schema", f"{field}.function.parameters")
    if not isinstance(strict, bool | None):
        raise errors.InvalidArgument.must_be("true or false", f"{field}.function.strict")
    more = {} if strict is None else {"strict": strict}
    given = {"name": name, "description": description, "parameters": parameters or _NO_PARAMETERS, **more}
    return {"type": "function", "function": given}


def _as_rendered(message: Message, form: ContentFormat) -> Message:
    content: str | list[dict[str, str]] = "\n".join(texts_of(message["content"]))
    if form is ContentFormat.PARTS:
        given = message["content"]
        parts = [{"type": "text", "text": given}] if isinstance(given, str) else given or []
        content = "\n".join(part["text"] for part in parts) if message["role"] == "tool" else parts
    reasoning = {"reasoning_content": message["reasoning"]} if "reasoning" in message else {}
    return {**message, "content": content, **reasoning}


def _role_without_developer(message: Message) -> str:
    role: str = message["role"]
    return "system" if role == "developer" else role


def _with_one_system(messages: list[Message]) -> list[Message]:
    """Return messages with the texts of all system messages in the first."""
    systems = [message for message in messages if message["role"] == "system"]
    if systems == messages[:1]:
        return messages
    found = ["\n".join(_all_texts(message["content"])) for message in systems]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, found))}, *others]


def _all_texts(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _check_list(value: Any, field: str, wanted: str) -> None:
    if not isinstance(value, list):
        raise errors.InvalidArgument.must_be(wanted, field)
    if not value:
        raise errors.EmptyBatch(f"must be {wanted}", field=field)


def _no_function(value: Any, wanted: str, field: str) -> errors.InvalidArgument:
    """Return the error of a call or a tool that is none."""
    if not isinstance(value, dict):
        return errors.InvalidArgument.must_be(wanted, field)
    return errors.InvalidArgument(f"must be {wanted}", field=field)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise errors.InvalidArgument.must_be("text", field)
    return value
