"""A request's body as a JSON object."""

from __future__ import annotations

import json
from typing import Any

from paceline import errors


def read_object(content: bytes) -> dict[str, Any]:
    """Parse a body. Raises UnreadableMessage unless it is a JSON object."""
    try:
        body = json.loads(content.decode())  # of bytes it would take UTF-16, too, and halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise errors.UnreadableMessage("the body is not JSON") from error
    if not isinstance(body, dict):
        raise errors.UnreadableMessage("the body is no JSON object")
    return body
