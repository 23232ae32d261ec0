"""Both ways of loading an adapter into vLLM give the same bits, however slots are reused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from support.stacks.sampler_contract import IDS, PROMPT, TARGETS, Completion, ask, one, options_for

from sampler_service.engine.factory import create_engine
from sampler_service.engine.protocol import Adapter

pytestmark = pytest.mark.asyncio(loop_scope="session")

BFLOAT16_DIFFERENCE = 0.5
"""A difference of log-probabilities that rounding alone stays well below, and a step with another adapter does not."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ways(model_path, vllm_here):
    """Yield an engine that copies into slots and one where vLLM loads: two slots, four adapters in memory."""
    async with AsyncExitStack() as stack:
        engines = []
        for apply in ("direct", "stock"):
            engine = create_engine("vllm", replace(options_for(model_path), dtype="bfloat16", apply=apply))
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        yield engines


@pytest.fixture
def make_scaled(make_adapter):
    """Return a maker of adapters in a given dtype whose scaling is not a power of two, so that rounding shows."""

    def make(dtype="float32", targets=TARGETS, rank=4, alpha=5.4, in_memory=True):
        adapter = make_adapter(rank=rank, targets=targets)
        weights, config = adapter.path / "adapter_model.safetensors", adapter.path / "adapter_config.json"
        cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(weights).items()}
        save_file(cast, weights)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": alpha}))
        return replace(adapter, in_memory=in_memory)

    return make


async def logprobs(engine, adapter: Adapter | None = None) -> bytes:
    return (await engine.compute_logprobs(PROMPT, adapter, "")).tobytes()


async def add(engine, *adapters: Adapter) -> None:
    for adapter in adapters:
        await engine.add_adapter(adapter)


async def remove(engine, *adapters: Adapter) -> None:
    for adapter in adapters:
        await engine.remove_adapter(adapter)


CASES = {
    "all": {},
    "stored as the model": {"dtype": "bfloat16"},
    "stored as half": {"dtype": "float16"},
    "q alone": {"targets": ["q_proj"]},
    "gate and o": {"targets": ["gate_proj", "o_proj"], "rank": 2},
    "unembed": {"targets": ["lm_head", "down_proj"]},
    "as wide as a slot": {"rank": 8, "alpha": 8},
    "read from a volume": {"in_memory": False},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_the_same_adapter_gives_the_same_bits_either_way(ways, make_scaled, case):
    adapter = make_scaled(**case)
    answers = []
    for engine in ways:
        await add(engine, adapter)
        answers.append(await logprobs(engine, adapter))
        assert await logprobs(engine) != answers[-1]
        await remove(engine, adapter)
    assert answers[0] == answers[1]


async def test_scaling_is_applied_once_and_never_to_the_staged_file(ways, make_scaled):
    direct, _ = ways
    adapter = make_scaled()
    weights = adapter.path / "adapter_model.safetensors"
    before, answers = hashlib.sha256(weights.read_bytes()).digest(), set()
    for _ in range(4):
        again = replace(adapter, adapter_id=next(IDS), name=f"run@{next(IDS)}")
        await add(direct, again)
        answers.add(await logprobs(direct, again))
        await remove(direct, again)
    assert len(answers) == 1
    assert hashlib.sha256(weights.read_bytes()).digest() == before


async def test_adapters_that_lose_their_slot_come_back_as_they_were(ways, make_scaled):
    adapters = [make_scaled(rank=rank, targets=targets) for rank, targets in
                ((4, TARGETS), (4, TARGETS), (8, TARGETS), (2, ["q_proj", "down_proj"]))]  # fmt: skip
    rounds = []
    for engine in ways:
        await add(engine, *adapters)
        rounds.append([await logprobs(engine, adapters[i % 4]) for i in (0, 1, 2, 3, 0, 2, 1, 3, 3, 0)])
        extra = [replace(adapters[i], adapter_id=next(IDS), name=f"run@{next(IDS)}") for i in (3, 0)]
        await remove(engine, *adapters[:2])
        await add(engine, *extra)
        rounds[-1] += [await logprobs(engine, adapter) for adapter in (*extra, adapters[2], *extra)]
        await remove(engine, *adapters[2:], *extra)
    assert rounds[0] == rounds[1]
    assert len(set(rounds[0])) == 4


async def test_a_slot_that_a_running_request_uses_is_not_taken(ways, make_scaled):
    """Each request is sampled from its own adapter to its end: scored with it, and nothing beside it, it is the same.

    Its tokens are not compared with those that it gets alone: rounding in bfloat16 depends on the rows of a step.
    """
    direct, stock = ways
    running, late = [make_scaled(), make_scaled()], make_scaled()
    await add(direct, *running)
    streams = [direct.generate(ask(max_tokens=90, seed=3, adapter=adapter, ignore_eos=True)) for adapter in running]
    completions = [Completion() for _ in streams]
    for completion, stream in zip(completions, streams, strict=True):
        completion.add(await anext(stream))
    assert not (await direct.add_adapter(late)).in_slot
    waiting = asyncio.create_task(logprobs(direct, late))
    for adapter, completion, stream in zip(running, completions, streams, strict=True):
        async for delta in stream:
            completion.add(delta)
        assert await difference(stock, adapter, completion) < BFLOAT16_DIFFERENCE
        assert await difference(stock, late, completion) > BFLOAT16_DIFFERENCE
    await waiting
    again = replace(late, adapter_id=next(IDS), name="run@again")
    assert (await direct.add_adapter(again)).in_slot
    assert await logprobs(direct, late) == await logprobs(direct, again)
    await remove(direct, late, again, *running)


async def difference(engine, adapter: Adapter, completion: Completion) -> float:
    """Return the largest difference of a completion's log-probabilities from the adapter's, on an idle engine."""
    await add(engine, adapter)
    scored = await engine.compute_logprobs(PROMPT + completion.tokens, adapter, "")
    await remove(engine, adapter)
    return float(np.abs(scored[len(PROMPT) :] - completion.logprobs).max())


async def test_adapters_that_arrive_while_another_is_sampled_take_the_free_slot(ways, make_scaled):
    """One of the two slots belongs to a running request, so each new adapter takes the other one."""
    direct, _ = ways
    running, late = make_scaled(), [make_scaled() for _ in range(3)]
    await add(direct, running)
    alone = await one(direct, ask(max_tokens=90, seed=3, adapter=running, ignore_eos=True))
    stream = direct.generate(ask(max_tokens=90, seed=3, adapter=running, ignore_eos=True))
    tokens = (await anext(stream)).tokens
    for adapter in late:
        assert (await direct.add_adapter(adapter)).in_slot
    tokens += [token async for delta in stream for token in delta.tokens]
    assert tokens == alone.tokens
    again = replace(late[-1], adapter_id=next(IDS), name=f"run@{next(IDS)}")
    await remove(direct, *late[:-1])
    await add(direct, again)
    assert await logprobs(direct, late[-1]) == await logprobs(direct, again) != await logprobs(direct, running)
    await remove(direct, late[-1], again, running)


async def test_an_adapter_that_a_worker_cannot_load_ends_no_request(ways, make_scaled):
    direct, _ = ways
    broken = make_scaled()
    (broken.path / "adapter_model.safetensors").write_bytes(b"no header")
    stream = direct.generate(ask(max_tokens=90, ignore_eos=True))
    tokens = (await anext(stream)).tokens
    with pytest.raises(Exception, match="collective_rpc"):
        await direct._started.llm.collective_rpc("load_adapter", args=(next(IDS), "broken", str(broken.path), True))
    tokens += [token async for delta in stream for token in delta.tokens]
    assert len(tokens) == 90


async def test_versions_of_a_run_never_share_cached_prefixes(ways, make_scaled):
    first, second = make_scaled(), make_scaled()
    answers = []
    for engine in ways:
        for adapter in (first, second):
            await add(engine, adapter)
            await one(engine, ask(PROMPT * 3, max_tokens=2, adapter=adapter))
        completions = [await one(engine, ask(PROMPT * 3, max_tokens=4, seed=1, adapter=adapter, ignore_eos=True))
                       for adapter in (first, second)]  # fmt: skip
        answers.append([completion.logprobs for completion in completions])
        await remove(engine, first, second)
    np.testing.assert_array_equal(*answers)
    assert answers[0][0] != answers[0][1]
