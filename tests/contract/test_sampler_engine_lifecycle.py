"""How sampler engines end, by themselves or when asked to."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from descendants import descendants
from sampler_contract import ask, one, options_for

from paceline.errors import EngineUnavailable
from paceline.types import StopReason
from sampler_service.engine.factory import create_engine
from sampler_service.engine.vllm_engine import engine_args

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_vllm_that_died_is_reported_as_unavailable(model_path, vllm_here):
    before = descendants()
    engine = create_engine("vllm", options_for(model_path))
    await engine.start()
    async with aclosing(engine.generate(ask(ignore_eos=True))) as deltas:
        await anext(deltas)
        for process in set(descendants()).difference(before):
            process.kill()
        with pytest.raises(EngineUnavailable):
            async for _ in deltas:
                pass
    with pytest.raises(EngineUnavailable):
        await engine.check_health()
    with pytest.raises(EngineUnavailable):
        await one(engine, ask())
    await engine.stop()


@pytest.mark.parametrize("kind", ["hf", "vllm"])
async def test_stopping_ends_requests_as_aborted_and_later_ones_as_unavailable(kind, model_path, vllm_here):
    engine = create_engine(kind, options_for(model_path))
    await engine.start()
    async with aclosing(engine.generate(ask(num_samples=2, ignore_eos=True))) as deltas:
        await anext(deltas)
        await engine.stop()
        rest = [delta async for delta in deltas]
    assert sorted(delta.index for delta in rest if delta.stop_reason is StopReason.ABORTED) == [0, 1]
    with pytest.raises(EngineUnavailable):
        await one(engine, ask())
    with pytest.raises(EngineUnavailable):
        await engine.check_health()


async def test_an_engine_that_starts_again_samples_other_completions(model_path):
    drawn = []
    for _ in range(2):
        engine = create_engine("hf", options_for(model_path))
        await engine.start()
        drawn.append((await one(engine, ask(max_tokens=12, temperature=1.5, ignore_eos=True))).tokens)
        await engine.stop()
    assert drawn[0] != drawn[1]
    assert len({engine_args(options_for(model_path)).seed for _ in range(4)}) == 4, "vLLM's"
