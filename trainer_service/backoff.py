"""Exponential backoff with an upper limit."""

from __future__ import annotations


def backoff(failures: int, first: float, most: float) -> float:
    """Return the seconds to wait after consecutive failures: `first` after one, doubled after each, at most `most`."""
    return min(first * 2.0 ** min(failures - 1, 32), most) if failures > 0 else 0.0
