"""Limits on the bytes in memory at a time."""

from __future__ import annotations

import asyncio

import pytest

from trainer_service.limits.gates import ByteGate


class Holders:
    """Tasks that hold bytes until they are told to release them."""

    def __init__(self, gate: ByteGate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, size: int) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name, size))
        await settled()

    async def go(self, name: str) -> None:
        self.ends[name].set()
        await settled()

    async def _hold(self, name: str, size: int) -> None:
        async with self.gate.hold(size):
            self.entered.append(name)
            await self.ends[name].wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_does_not_fit_waits_in_order():
    holders = Holders(ByteGate(10))
    for name, size in (("a", 6), ("b", 4), ("c", 5), ("d", 1)):
        await holders.come(name, size)
    assert holders.entered == ["a", "b"]
    await holders.go("b")
    assert holders.entered == ["a", "b"], "d does not overtake c"
    await holders.go("a")
    assert holders.entered == ["a", "b", "c", "d"]
    for name in "cd":
        await holders.go(name)
    assert holders.gate.used == 0


async def test_what_is_larger_than_all_that_may_be_held_goes_alone():
    holders = Holders(ByteGate(10))
    for name, size in (("a", 3), ("b", 100), ("c", 3)):
        await holders.come(name, size)
    assert holders.entered == ["a"]
    await holders.go("a")
    assert holders.entered == ["a", "b"]
    await holders.go("b")
    assert holders.entered == ["a", "b", "c"]


async def test_one_that_leaves_while_it_waits_holds_nobody_up():
    holders = Holders(ByteGate(10))
    for name, size in (("a", 6), ("b", 10), ("c", 4)):
        await holders.come(name, size)
    holders.tasks["b"].cancel()
    await settled()
    assert holders.entered == ["a", "c"]
    assert holders.gate.used == 10


async def test_an_error_lets_the_next_in():
    gate = ByteGate(1)
    with pytest.raises(ValueError, match="torn"):
        async with gate.hold(1):
            raise ValueError("torn")
    async with asyncio.timeout(5), gate.hold(1):
        assert gate.used == 1
