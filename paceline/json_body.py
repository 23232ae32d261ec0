"""Parse a request's body as a JSON object."""

from __future__ import annotations

import json
from typing import Any

from paceline import errors


def read_object(content: bytes) -> dict[str, Any]:
    """Parse a request's body. Raises UnreadableMessage unless it is a JSON object."""
    try:
        body = json.loads(content.decode())  # given bytes, it would also accept UTF-16 and lone surrogates
    except (ValueError, RecursionError) as error:
        raise errors.UnreadableMessage("the body is not JSON") from error
    if not isinstance(body, dict):
        raise errors.UnreadableMessage("the body is no JSON object")
    return body
