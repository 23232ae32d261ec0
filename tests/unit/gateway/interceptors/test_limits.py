"""Places for calls: bounded in total and per tenant, handed out in turn."""

from __future__ import annotations

import asyncio

import pytest

from gateway.interceptors.limits import FairQueue
from paceline import errors


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _start(queue: FairQueue, tenant: str, order: list[str]) -> asyncio.Task[None]:
    async def run() -> None:
        await queue.acquire(tenant)
        order.append(tenant)

    return asyncio.create_task(run())


async def test_a_tenant_gets_no_more_places_than_its_limit():
    queue, order = FairQueue(10, 2, 10), []
    tasks = [_start(queue, "a", order) for _ in range(3)]
    await _settle()
    assert order == ["a", "a"]
    queue.release("a")
    await asyncio.gather(*tasks)


async def test_one_tenant_at_its_limit_does_not_stop_another():
    queue = FairQueue(10, 1, 10)
    await queue.acquire("a")
    waiting = _start(queue, "a", [])
    await queue.acquire("b")
    await _settle()
    assert not waiting.done()
    waiting.cancel()


async def test_tenants_take_turns_however_many_calls_one_has():
    queue, order = FairQueue(1, 1, 100), []
    await queue.acquire("x")
    tasks = [_start(queue, tenant, order) for tenant in "aaaabbc"]
    await _settle()
    running = "x"
    for _ in tasks:
        queue.release(running)
        await _settle()
        running = order[-1]
    assert "".join(order) == "abcabaa"


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    queue = FairQueue(10, 1, 1)
    await queue.acquire("a")
    waiting = _start(queue, "a", [])
    await _settle()
    with pytest.raises(errors.Overloaded) as caught:
        await queue.acquire("a")
    assert caught.value.retry_after
    waiting.cancel()


async def test_a_cancelled_call_leaves_the_queue():
    queue, order = FairQueue(1, 1, 2), []
    await queue.acquire("a")
    first, second = _start(queue, "a", order), _start(queue, "a", order)
    await _settle()
    first.cancel()
    await _settle()
    third = _start(queue, "a", order)
    queue.release("a")
    await second
    queue.release("a")
    await third
    assert order == ["a", "a"]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_no_place_is_lost_when_cancellation_and_admission_meet(cancel_first):
    queue = FairQueue(1, 1, 2)
    await queue.acquire("a")
    waiting = _start(queue, "a", [])
    await _settle()
    steps = [waiting.cancel, lambda: queue.release("a")]
    for step in steps if cancel_first else reversed(steps):
        step()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(queue.acquire("b"), 10)
