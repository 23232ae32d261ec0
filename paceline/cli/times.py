"""Durations as people write them: 30m, 12h, 7d."""

from __future__ import annotations

import re

import typer

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_WRITTEN = re.compile(r"([1-9][0-9]{0,8})([smhdw])")


def duration(text: str) -> int:
    """Return the seconds of a duration such as 7d."""
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 30m, 12h or 7d")
    return int(found[1]) * _SECONDS[found[2]]
