"""Limits the bytes held in memory at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteGate:
    """Admits holders of bytes in order of arrival, each once its bytes fit beside those already held."""

    def __init__(self, limit: int) -> None:
        """Admit `limit` bytes at a time, or a single larger holder alone; 0 means no limit."""
        self._limit = limit
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._holders = 0
        self.held = 0
        """Bytes held at present."""

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes fit, and hold them while the block runs."""
        if self._waiting or not self._fits(size):
            place = asyncio.get_running_loop().create_future()
            self._waiting.append((place, size))
            try:
                await place
            except asyncio.CancelledError:
                if place.cancelled():
                    self._let_in()
                else:  # it was admitted at the same moment
                    self._leave(size)
                raise
        else:
            self._enter(size)
        try:
            yield
        finally:
            self._leave(size)

    def _fits(self, size: int) -> bool:
        return not self._limit or not self._holders or self.held + size <= self._limit

    def _enter(self, size: int) -> None:
        self._holders += 1
        self.held += size

    def _leave(self, size: int) -> None:
        self._holders -= 1
        self.held -= size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and (self._waiting[0][0].cancelled() or self._fits(self._waiting[0][1])):
            place, size = self._waiting.popleft()
            if not place.cancelled():
                self._enter(size)
                place.set_result(None)
