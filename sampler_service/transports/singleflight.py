"""Deduplicates concurrent fetches: callers that ask for the same key share one."""

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
    """Bound the time that a version takes to arrive. Raises TrainerUnavailable on timeout."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise errors.TrainerUnavailable("the version did not arrive in time; try again") from error


class Singleflight(Generic[T]):
    """Fetches in progress, by key and by the tenant that they run for.

    A fetch may fail for one tenant and succeed for another, so a tenant shares only its own fetches and the sampler's.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[VersionKey, str], asyncio.Task[T]] = {}

    async def join(self, key: VersionKey, tenant: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the fetch in progress, or start one. The fetch continues if a caller is cancelled."""
        task = self._tasks.get((key, PEER_TENANT)) or self._tasks.get((key, tenant))
        if task is None:
            task = self._tasks[key, tenant] = asyncio.create_task(start())
            task.add_done_callback(lambda done: self._landed(key, tenant, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel all fetches."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: VersionKey, tenant: str, task: asyncio.Task[T]) -> None:
        del self._tasks[key, tenant]
        if not task.cancelled():
            task.exception()  # waiters raise it; if there are none, asyncio must not report it as never retrieved
