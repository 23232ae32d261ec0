"""How long tests wait for what must happen, and how they see that nothing happens any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds; long enough that only what never happens is late, even on a busy machine."""


async def standing_still(count: Callable[[], int], seconds: float = 0.1) -> int:
    """Return a count once it has not changed for `seconds`, as where a full buffer blocks, which no event tells."""
    before = -1
    while before != (now := count()):
        before = now
        await asyncio.sleep(seconds)
    return before
