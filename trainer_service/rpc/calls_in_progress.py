"""The calls that a stopping trainer lets finish: all but watches, which end only when one side ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.rpc.interceptors import AroundInterceptor, Call

_WATCHES = frozenset(
    {"/paceline.weights.v1.WeightService/WatchVersions", "/paceline.metrics.v1.MetricsService/WatchMetrics"}
)


class CallsInProgress(AroundInterceptor):
    """Counts calls other than watches."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        if call.method in _WATCHES:
            yield
            return
        self._count += 1
        self._none.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()

    async def finished(self) -> None:
        """Wait until no call but watches is in progress."""
        await self._none.wait()
