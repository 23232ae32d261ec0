"""Which tenant's completions the engine gets next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sampler_service.engine.protocol import AT_ONCE, priority_of
from sampler_service.scheduling.tenant_queue import TakenPlaces, TenantQueue

A, B = "anquetil", "bartali"


class Requests:
    """Requests in the order of their turns; each holds its places until it is ended."""

    def __init__(self, queue: TenantQueue) -> None:
        self.queue = queue
        self.begun: list[str] = []
        self._places: dict[str, TakenPlaces] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, name: str, completions: int = 1) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, completions))
        await settled()

    async def end(self, name: str, completions: int = 0) -> None:
        """End some of a request's completions, or the whole request."""
        if completions:
            self._places[name].ended(completions)
        else:
            self._ends[name].set()
        await settled()

    def priorities(self, name: str, completions: int = 1) -> list[int]:
        """Return the priorities of a request's completions in the engine."""
        return [priority_of(sample, self._places[name].priority) for sample in range(completions)]

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settled()

    async def _run(self, name: str, completions: int) -> None:
        async with self.queue.places(name.rstrip("0123456789"), completions) as places:
            self._places[name] = places
            self.begun.append(name)
            await self._ends[name].wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def requests(places: int, *, first_at_once: bool = False) -> AsyncIterator[Requests]:
    sent = Requests(TenantQueue(places, first_at_once=first_at_once))
    yield sent
    for task in sent.tasks.values():
        task.cancel()
    await asyncio.gather(*sent.tasks.values(), return_exceptions=True)
    assert sent.queue.waiting == 0


async def test_a_tenant_with_one_request_does_not_stand_behind_anothers_many():
    async with requests(2) as sent:
        for number in range(10):
            await sent.send(f"{A}{number}")
        await sent.send(f"{B}0")
        assert sent.begun == [f"{A}0", f"{A}1"]
        await sent.end(f"{A}0")
        assert sent.begun[2:] == [f"{B}0"]
        await sent.end(f"{A}1")
        await sent.end(f"{B}0")
        assert sent.begun[3:] == [f"{A}2", f"{A}3"]


async def test_what_counts_is_completions_and_not_requests():
    async with requests(1) as sent:
        await sent.send(f"{A}0", 4)
        for number in (1, 2, 3):
            await sent.send(f"{A}{number}", 4)
        for number in range(8):
            await sent.send(f"{B}{number}", 1)
        for _ in range(9):
            await sent.end(sent.begun[-1])
        had = {tenant: [name for name in sent.begun if name.startswith(tenant)] for tenant in (A, B)}
        assert len(had[A]) * 4 - len(had[B]) in range(-4, 5)
        assert len(had[B]) == 7 or len(had[B]) == 8


async def test_places_are_given_back_as_completions_end():
    async with requests(4) as sent:
        await sent.send(f"{A}0", 6)
        await sent.send(f"{B}0", 1)
        await sent.end(f"{A}0", 2)
        assert sent.begun == [f"{A}0"]
        assert sent.queue.waiting == 1
        await sent.end(f"{A}0", 1)
        assert sent.begun == [f"{A}0", f"{B}0"]
        await sent.end(f"{A}0", 100)  # releases no more than it has
        await sent.send(f"{A}1", 4)
        await sent.send(f"{A}2", 1)
        assert sent.begun == [f"{A}0", f"{B}0", f"{A}1"]


async def test_one_that_leaves_while_it_waits_holds_nobody_up():
    async with requests(1) as sent:
        for name in (f"{A}0", f"{A}1", f"{B}0", f"{A}2"):
            await sent.send(name)
        await sent.cancel(f"{B}0")
        await sent.cancel(f"{A}1")
        assert sent.queue.waiting == 1
        await sent.end(f"{A}0")
        assert sent.begun == [f"{A}0", f"{A}2"]


async def test_one_that_leaves_when_its_turn_comes_gives_it_to_the_next():
    async with requests(1) as sent:
        for name in (f"{A}0", f"{A}1", f"{A}2"):
            await sent.send(name)
        sent._places[f"{A}0"].ended(0)
        sent._ends[f"{A}0"].set()
        await asyncio.sleep(0)  # the place belongs to A1, which has not woken up
        await sent.cancel(f"{A}1")
        assert sent.begun == [f"{A}0", f"{A}2"]


async def test_the_turn_of_one_that_leaves_as_it_comes_is_the_next_ones():
    async with requests(1) as sent:
        for name in (f"{A}0", f"{A}1", f"{A}2", f"{B}0"):
            await sent.send(name)
        sent.tasks[f"{A}1"].cancel()
        sent.tasks[f"{B}0"].cancel()
        sent._places[f"{A}0"].end()  # in the same iteration of the event loop: neither has left the queue
        await settled()
        assert sent.begun == [f"{A}0", f"{A}2"]
        await sent.end(f"{A}2")
        await sent.send(f"{A}3")
        assert sent.begun[2:] == [f"{A}3"]


async def test_an_error_gives_the_places_back():
    queue = TenantQueue(1)
    with pytest.raises(ValueError, match="torn"):
        async with queue.places(A, 3):
            raise ValueError("torn")
    async with asyncio.timeout(5), queue.places(B, 1):
        pass


async def test_a_tenant_that_was_away_has_saved_nothing_up():
    async with requests(1) as sent:
        await sent.send(f"{A}0")
        for number in range(20):
            await sent.end(f"{A}{number}")
            await sent.send(f"{A}{number + 1}")
        for number in range(4):
            await sent.send(f"{B}{number}")
        for number in range(21, 25):
            await sent.send(f"{A}{number}")
        for _ in range(4):
            await sent.end(sent.begun[-1])
        last = [name[0] for name in sent.begun[-4:]]
        assert sorted(last) == [A[0], A[0], B[0], B[0]]


async def test_a_tenant_that_has_nothing_in_the_engine_waits_for_no_others_many():
    async with requests(2, first_at_once=True) as sent:
        for number in range(4):
            await sent.send(f"{A}{number}", 256)
        assert sent.begun == [f"{A}0"]
        for number in range(3):
            await sent.send(f"{B}{number}")
        assert sent.begun == [f"{A}0", f"{B}0"], "the second has to wait for its turn"
        for number in range(3):
            await sent.end(f"{B}{number}")
        assert sent.begun == [f"{A}0", f"{B}0", f"{B}1", f"{B}2"]
        await sent.end(f"{A}0")
        assert sent.begun[4:] == [f"{A}1"]


async def test_one_that_is_first_and_leaves_lets_the_next_of_its_tenant_in():
    async with requests(1, first_at_once=True) as sent:
        for name in (f"{A}0", f"{B}0", f"{B}1", f"{B}2", f"{A}1"):
            await sent.send(name)
        assert sent.begun == [f"{A}0", f"{B}0"]
        await sent.cancel(f"{B}1")
        await sent.cancel(f"{B}0")
        assert sent.begun == [f"{A}0", f"{B}0", f"{B}2"]
        await sent.end(f"{B}2")
        await sent.end(f"{A}0")
        assert sent.begun[3:] == [f"{A}1"]


async def test_what_waits_in_the_engine_goes_by_turns_of_the_tenants():
    """The engine runs 4 of A's 8, and has had an end of 2 when B comes."""
    async with requests(16, first_at_once=True) as sent:
        await sent.send(f"{A}0", 8)
        await sent.end(f"{A}0", 2)
        await sent.send(f"{B}0")
        await sent.send(f"{B}1", 4)
        waiting = sent.priorities(f"{A}0", 8)[6:]
        assert max(sent.priorities(f"{B}1", 4)) == waiting[0], "B has had as many as A when it comes to A's seventh"
        await sent.send(f"{A}1", 2)
        assert min(sent.priorities(f"{A}1", 2)) > max(waiting)


async def test_one_completion_of_a_tenant_that_has_none_in_the_engine_starts_at_once():
    async with requests(16, first_at_once=True) as sent:
        await sent.send(f"{A}0", 3)
        await sent.send(f"{A}1")
        assert [number < 0 for number in sent.priorities(f"{A}0", 3)] == [True, False, False]
        assert sent.priorities(f"{A}1") == [3]
        await sent.end(f"{A}0")
        await sent.end(f"{A}1")
        await sent.send(f"{A}2")
        assert sent.priorities(f"{A}2") == [4 - AT_ONCE]


async def test_what_a_tenant_gives_up_sets_no_other_back():
    async with requests(16, first_at_once=True) as sent:
        await sent.send(f"{A}0", 1000)
        await sent.cancel(f"{A}0")
        await sent.send(f"{B}0")
        await sent.send(f"{B}1")
        await sent.send(f"{A}1")
        await sent.send(f"{A}2")
        assert sent.priorities(f"{B}1") < sent.priorities(f"{A}2")
        assert sent.priorities(f"{B}1") == [1]
