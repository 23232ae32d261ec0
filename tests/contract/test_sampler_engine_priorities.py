"""In which order engines start completions. They run 16 at a time, and more wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.stacks.sampler_contract import ask, complete, one
from support.stacks.sampler_stack import until

from sampler_service.engine.protocol import AT_ONCE

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def heavy_load(engine) -> AsyncIterator[list[asyncio.Task]]:
    """Two requests of 48 samples in turns 0 to 47 and 48 to 95, of which the engine runs the first."""
    requests = [ask(max_tokens=96, ignore_eos=True, num_samples=48, priority=turn) for turn in (0, 48)]
    tasks = [asyncio.create_task(complete(engine, request)) for request in requests]
    try:
        await until(lambda: engine.num_running() == 96)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_completion_that_is_to_start_at_once_waits_for_no_other(engine):
    async with heavy_load(engine):
        for turn in range(3):
            await one(engine, ask(max_tokens=1, priority=turn - AT_ONCE))
            assert engine.num_running() == 96, "it waited until one of the others had ended"


async def test_a_waiting_completion_takes_its_turn(engine):
    async with heavy_load(engine) as heavy:
        late = asyncio.create_task(one(engine, ask(max_tokens=1, priority=96)))
        await one(engine, ask(max_tokens=1, priority=20))
        assert not late.done()
        assert not heavy[1].done()
        assert engine.name == "hf" or not heavy[0].done(), "vLLM starts each sample in a turn of its own"
        late.cancel()


@pytest.mark.parametrize("engine", ["vllm", "vllm stock"], indirect=True)
async def test_only_the_first_sample_of_a_request_starts_at_once(engine):
    async with heavy_load(engine) as heavy:
        deltas = engine.generate(ask(max_tokens=1, num_samples=2, priority=20 - AT_ONCE))
        running = [(delta.index, engine.num_running()) async for delta in deltas]
        assert running[0] == (0, 97)
        assert running[1][0] == 1
        assert running[1][1] < 96, "the second waited until others had ended"
        assert not heavy[0].done()
