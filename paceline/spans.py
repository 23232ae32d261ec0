"""Ranges of numbers in messages."""

from __future__ import annotations


def span(first: object, last: object, preposition: str = "from ") -> str:
    """Return "from 3 to 7", or "3" if that is the only number."""
    start, end = str(first), str(last)
    return start if start == end else f"{preposition}{start} to {end}"
