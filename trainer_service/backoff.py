"""How long to wait between attempts at what fails: ever longer, up to a limit."""

from __future__ import annotations


def backoff(failures: int, first: float, most: float) -> float:
    """Return the seconds to wait after that many failures in a row: `first` after one, then twice as long each time."""
    return min(first * 2.0 ** min(failures - 1, 32), most) if failures > 0 else 0.0
