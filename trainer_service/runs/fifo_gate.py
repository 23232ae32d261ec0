"""A FIFO gate."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class FifoGate:
    """Lets each entrant proceed when all that entered before it have left."""

    def __init__(self) -> None:
        self._places: deque[asyncio.Event] = deque()

    @contextmanager
    def enter(self) -> Iterator[asyncio.Event]:
        """Queue until the end of the block; the event is set when all that entered before have left."""
        place = asyncio.Event()
        self._places.append(place)
        self._call_first()
        try:
            yield place
        finally:
            self._places.remove(place)
            self._call_first()

    def _call_first(self) -> None:
        if self._places:
            self._places[0].set()
