"""How sampler engines end, by themselves or on request."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file
from support.descendants import descendants
from support.stacks.sampler_contract import PROMPT, ask, complete, one, options_for
from support.stacks.sampler_stack import until

from paceline.errors import EngineUnavailable, InvalidArgument, Unsupported
from paceline.layout import WEIGHTS_FILE
from paceline.types import SamplingParams, StopReason
from sampler_service.engine.factory import create_engine
from sampler_service.engine.protocol import EngineUnfit, TextEndpoint, TextRequest, TextSampling
from sampler_service.engine.vllm.engine import SOCKETS_VARIABLE, engine_args

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("kind", ["hf", "vllm"])
async def test_no_engine_starts_on_a_model_that_lacks_a_weight(kind, model_path, tmp_path, vllm_here):
    directory = tmp_path / "model"
    shutil.copytree(model_path, directory)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    engine = create_engine(kind, options_for(directory))
    try:
        with pytest.raises(EngineUnfit, match=r"model\.layers\.0\.mlp\.up_proj\.weight is missing"):
            await engine.start()
    finally:
        await engine.stop()


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


async def test_loads_and_unloads_end_with_an_engine_that_died(model_path, make_adapter, vllm_here):
    before = descendants()
    engine = create_engine("vllm", options_for(model_path))
    await engine.start()
    adapter, other = make_adapter(), make_adapter()
    await engine.add_adapter(adapter)
    processes = set(descendants()).difference(before)
    for process in processes:
        process.suspend()
    calls = [asyncio.create_task(engine.add_adapter(other)), asyncio.create_task(engine.remove_adapter(adapter))]
    waiting = engine._live().llm.engine_core.utility_results
    await until(lambda: len(waiting) == len(calls))
    for process in processes:
        process.kill()
    await engine.stop()
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [EngineUnavailable, EngineUnavailable]


async def test_an_engine_that_ends_just_as_vllm_kills_it_is_stopped(model_path, vllm_here, monkeypatch):
    def ended_before(pid):
        process = psutil.Process(pid)
        process.kill()
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr("vllm.v1.utils.kill_process_tree", ended_before)
    before = descendants()
    engine = create_engine("vllm", options_for(model_path))
    await engine.start()
    llm = engine._live().llm
    for process in set(descendants()).difference(before):
        process.suspend()  # so that it is still there when vLLM stops waiting for it
    await engine.stop()
    await asyncio.sleep(0)
    assert llm.engine_core.resources.output_socket.closed
    assert llm.engine_core.resources.output_queue_task.done()
    with pytest.raises(EngineUnavailable):
        await engine.check_health()


@pytest.mark.parametrize("length", [1, 40], ids=["short", "too long for a directory"])
async def test_sockets_of_a_stopped_vllm_are_removed_if_they_have_a_directory(
    length, model_path, vllm_here, monkeypatch
):
    with TemporaryDirectory(prefix="v" * length, dir="/tmp") as directory:
        monkeypatch.setenv(SOCKETS_VARIABLE, directory)
        engine = create_engine("vllm", options_for(model_path))
        await engine.start()
        assert any(stat.S_ISSOCK(path.stat().st_mode) for path in Path(directory).rglob("*"))  # noqa: ASYNC240
        await engine.stop()
        assert any(Path(directory).iterdir()) is (length > 1)  # noqa: ASYNC240
        assert os.environ[SOCKETS_VARIABLE] == directory


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


async def test_a_request_that_still_scores_its_prompt_when_the_engine_stops_is_unavailable(model_path, monkeypatch):
    engine = create_engine("hf", options_for(model_path))
    await engine.start()

    async def score(_):
        await engine.stop()

    monkeypatch.setattr(engine, "_prompt_score", score)
    with pytest.raises(EngineUnavailable):
        async with asyncio.timeout(30):
            await one(engine, ask())


async def test_what_an_adapter_that_overflows_leaves_in_the_cache_reaches_nobody_else(
    model_path, reference, make_adapter, vllm_here
):
    adapter = make_adapter()
    file = adapter.path / WEIGHTS_FILE
    save_file({name: weight * 1e30 for name, weight in load_file(file).items()}, file)
    engine = create_engine("vllm", replace(options_for(model_path), kv_cache_gib=2**-10))
    await engine.start()
    await engine.add_adapter(adapter)
    for seed in range(20):
        await complete(engine, ask(max_tokens=2, seed=seed, adapter=adapter, num_samples=4))
        completion = await one(engine, ask(max_tokens=6, seed=seed, ignore_eos=True))
        expected = reference.logprobs(PROMPT + completion.tokens)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    await engine.stop()


async def test_an_engine_that_starts_again_samples_other_completions(model_path):
    drawn = []
    for _ in range(2):
        engine = create_engine("hf", options_for(model_path))
        await engine.start()
        drawn.append((await one(engine, ask(max_tokens=12, temperature=1.5, ignore_eos=True))).tokens)
        await engine.stop()
    assert drawn[0] != drawn[1]
    assert len({engine_args(options_for(model_path)).seed for _ in range(4)}) == 4, "vLLM's"


async def test_a_text_request_that_cannot_be_sent_is_refused_and_leaves_nothing(engine):
    @asynccontextmanager
    async def place(*_):
        yield 0

    body, sampling = {"prompt": [PROMPT] * 3}, TextSampling(SamplingParams(max_tokens=1, top_k=2**64))
    request = TextRequest(TextEndpoint.COMPLETIONS, body, sampling, None, "team", place, lambda logprobs: None)
    with pytest.raises(Unsupported if engine.name == "hf" else InvalidArgument):
        async for _ in engine.complete_text(request):
            pass
    assert engine.num_running() == 0
