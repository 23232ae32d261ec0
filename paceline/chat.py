"""Checks of conversations in the JSON shape of OpenAI's chat API, made before a chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline import errors
from paceline.bodies import check_parts, depth_of

_ALWAYS_WITH_CONTENT = ("user", "system", "developer")
"""Roles whose messages have a text; the others may have tool calls instead."""
_MAX_DEPTH = 64
_CHARACTERS_PER_TOKEN = 32
"""Most characters per token, on average: longer texts are refused before they are tokenized."""


def read_object(content: bytes) -> dict[str, Any]:
    """Parse a request's body. Raises UnreadableMessage unless it is a JSON object."""
    try:
        body = json.loads(content.decode())  # given bytes, it would also accept UTF-16 and lone surrogates
    except (ValueError, RecursionError) as error:
        raise errors.UnreadableMessage("the body is not JSON") from error
    if not isinstance(body, dict):
        raise errors.UnreadableMessage("the body is not a JSON object")
    return body


def read_chat_body(content: bytes) -> dict[str, Any]:
    """Parse a body whose strings go to a tokenizer. Raises UnreadableMessage, InvalidArgument, OutOfRange."""
    check_parts(content)
    if depth_of(content) > _MAX_DEPTH:
        raise errors.InvalidArgument(f"is nested deeper than {_MAX_DEPTH}", field="body")
    body = read_object(content)
    if b"\\ud" in content.lower() and not _is_unicode(body):
        raise errors.UnreadableMessage("the body holds text that is not valid Unicode: half of a surrogate pair")
    return body


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages that hold only text: nothing is fetched for a caller.

    Raises InvalidArgument, MissingField, Unsupported.
    """
    if not isinstance(messages, list) or not messages:
        raise errors.InvalidArgument("must be a list of messages, at least one", field="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise errors.InvalidArgument("must be an object", field=f"messages[{index}]")
        content = message.get("content")
        if content is None and message.get("role") in _ALWAYS_WITH_CONTENT:
            raise errors.MissingField("is not set; give the message's text", field=f"messages[{index}].content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise errors.Unsupported("accepts only text", field=f"messages[{index}].content")
    return messages


def check_length(field: str, value: Any, max_context_length: int) -> int:
    """Return the number of characters in a value. Raises SequenceTooLong if they cannot fit the context."""
    length = sum(map(len, _texts(value)))
    if length > _CHARACTERS_PER_TOKEN * max_context_length:
        message = f"has {length} characters; the context is {max_context_length} tokens"
        raise errors.SequenceTooLong(message, field=field)
    return length


def _is_unicode(body: dict[str, Any]) -> bool:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts(part)
