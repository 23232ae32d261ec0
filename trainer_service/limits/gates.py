"""Gates that admit in order of arrival, and work that gives way to other work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress


class ByteGate:
    """Admits holders of bytes in order of arrival, each once its bytes fit beside those in use."""

    def __init__(self, limit: int) -> None:
        """Admit `limit` bytes at a time, or a single larger holder alone; 0 means no limit."""
        self._limit = limit
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._holders = 0
        self.used = 0
        """Bytes in use at present."""

    @property
    def is_awaited(self) -> bool:
        """Whether a holder waits for others to leave."""
        return bool(self._waiting)

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes fit, and hold them while the block runs."""
        if self._waiting or not self._fits(size):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, size))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._admit_waiting()
                else:  # it was admitted at the same moment
                    self._release(size)
                raise
        else:
            self._acquire(size)
        try:
            yield
        finally:
            self._release(size)

    def _fits(self, size: int) -> bool:
        return not self._limit or not self._holders or self.used + size <= self._limit

    def _acquire(self, size: int) -> None:
        self._holders += 1
        self.used += size

    def _release(self, size: int) -> None:
        self._holders -= 1
        self.used -= size
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and (self._waiting[0][0].cancelled() or self._fits(self._waiting[0][1])):
            turn, size = self._waiting.popleft()
            if not turn.cancelled():
                self._acquire(size)
                turn.set_result(None)


class FifoGate:
    """Lets each entrant proceed when all that entered before it have left."""

    def __init__(self) -> None:
        self._turns: deque[asyncio.Event] = deque()

    @contextmanager
    def enter(self) -> Iterator[asyncio.Event]:
        """Queue until the end of the block; the event is set when all that entered before have left."""
        turn = asyncio.Event()
        self._turns.append(turn)
        self._wake_first()
        try:
            yield turn
        finally:
            self._turns.remove(turn)
            self._wake_first()

    def _wake_first(self) -> None:
        if self._turns:
            self._turns[0].set()


class Foreground:
    """Work that callers wait for. What nobody waits for gives way to it, for a while each time."""

    def __init__(self) -> None:
        self._working = 0
        self._change = asyncio.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the block as work that a caller waits for."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self.wake()

    def wake(self) -> None:
        """Have those that give way look again whether they may go on."""
        self._change.set()
        self._change = asyncio.Event()

    async def give_way(self, seconds: float, is_urgent: Callable[[], bool]) -> None:
        """Wait until no caller waits for work, until this is urgent, or at most some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._working and not is_urgent():
                    await self._change.wait()
