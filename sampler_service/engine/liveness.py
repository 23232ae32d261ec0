"""Waiting for an engine that may die meanwhile, or has died."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline.errors import EngineUnavailable

T = TypeVar("T")

HEALTH_SECONDS = 1.0
"""Interval between health checks of an engine."""


async def while_alive(check_health: Callable[[], Awaitable[None]], work: Awaitable[T]) -> T:
    """Return the result of work on an engine. Raises what `check_health` raises if the engine dies meanwhile.

    vLLM does not answer the calls that were in progress when its process died.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=HEALTH_SECONDS))[0]:
            await check_health()
        return await task
    finally:
        task.cancel()


async def until_alive(check_health: Callable[[], Awaitable[None]]) -> None:
    """Wait until an engine is alive: a dead one is restarted, or its service ends."""
    while True:
        try:
            return await check_health()
        except EngineUnavailable:
            await asyncio.sleep(HEALTH_SECONDS)
