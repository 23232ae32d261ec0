"""Bodies in the JSON shape of OpenAI's API: parsed, and refused if they are too deep or too long to tokenize."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline import errors
from paceline.requests.bodies import check_parts, depth_of

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
