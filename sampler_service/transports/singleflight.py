"""Work that many wait for and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from paceline import errors
from paceline.rpc.identity import PEER_TENANT
from sampler_service.transports.version_keys import VersionKey

T = TypeVar("T")


@asynccontextmanager
async def arriving_within(seconds: float) -> AsyncIterator[None]:
    """Bound what brings a version. Raises TrainerUnavailable when the time is over."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise errors.TrainerUnavailable("the version did not arrive in time; try again") from error


class Singleflight(Generic[T]):
    """Fetches under way, by key and by whom they run for.

    A fetch for a tenant may fail where one for another tenant would not, so a tenant shares only its own and the
    sampler's.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[VersionKey, str], asyncio.Task[T]] = {}

    async def join(self, key: VersionKey, tenant: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the fetch that is under way, or for a new one."""
        task = self._tasks.get((key, PEER_TENANT)) or self._tasks.get((key, tenant))
        if task is None:
            task = self._tasks[key, tenant] = asyncio.create_task(start())
            task.add_done_callback(lambda done: self._landed(key, tenant, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: VersionKey, tenant: str, task: asyncio.Task[T]) -> None:
        del self._tasks[key, tenant]
        if not task.cancelled():
            task.exception()  # whoever still waits has it; unasked for, asyncio would report it as lost
