"""Who shares a fetch, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from paceline.layout import new_run_id
from sampler_service.stores.base import SharedFetches
from sampler_service.transports.base import VersionKey

KEY = VersionKey(new_run_id(), 1)


async def test_a_fetch_that_has_just_ended_is_not_shared():
    fetches, late = SharedFetches(), []

    async def again():
        return "second"

    async def fetch():
        # It runs when this fetch has ended, before any callback.
        late.append(asyncio.create_task(fetches.join(KEY, "tenant", again)))
        return "first"

    assert await fetches.join(KEY, "tenant", fetch) == "first"
    assert await late[0] == "second"


async def test_who_asks_again_and_again_lets_others_run():
    fetches, others = SharedFetches(), []

    async def fetch():
        late.append(asyncio.create_task(ask_until_others_ran()))

    async def ask_until_others_ran():
        asyncio.get_running_loop().call_soon(others.append, "ran")
        for _ in range(100):
            await fetches.join(KEY, "tenant", fetch_nothing)
            if others:
                return
        pytest.fail("nothing else ran meanwhile")

    async def fetch_nothing():
        pass

    late: list[asyncio.Task] = []
    await fetches.join(KEY, "tenant", fetch)
    await late[0]
