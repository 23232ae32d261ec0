"""The bounds of what clients attach to runs, sessions and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping

from paceline import errors

MAX_ENTRIES = 64
MAX_BYTES = 1024
"""Most bytes of an entry's name and value together."""


def check_user_metadata(metadata: Mapping[str, object], field: str = "user_metadata") -> None:
    """Check the number and the size of entries; a value that is no text counts as JSON. Raises OutOfRange."""
    if len(metadata) > MAX_ENTRIES:
        raise errors.OutOfRange(f"has {len(metadata)} entries; at most {MAX_ENTRIES} are accepted", field=field)
    for key, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(key.encode()) + len(text.encode()) > MAX_BYTES:
            raise errors.OutOfRange(f"has an entry of more than {MAX_BYTES} bytes; shorten it", field=field)
