"""The contract of every sampler engine for adapters. Checked against PEFT."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
from support.stacks.sampler_contract import IDS, PROMPT, TARGETS, ask, one, options_for
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidShape, RankTooLarge, VersionNotFound
from paceline.layout import WEIGHTS_FILE
from sampler_service.engine.factory import create_engine
from sampler_service.engine.hf.batch import Job
from sampler_service.engine.model_files import read_adapter
from sampler_service.engine.protocol import Adapter

pytestmark = pytest.mark.asyncio(loop_scope="session")


HEAD = ["lm_head", "down_proj"]


@pytest.mark.parametrize("targets", [TARGETS, ["q_proj"], HEAD, ["lm_head"]], ids=["all", "q", "unembed", "head"])
async def test_an_adapter_gives_the_logprobs_that_peft_gives(engine, reference, make_adapter, targets):
    adapter = make_adapter(targets=targets)
    await engine.add_adapter(adapter)
    completion = await one(engine, ask(max_tokens=10, seed=4, adapter=adapter, ignore_eos=True))
    tokens = PROMPT + completion.tokens
    expected = reference.logprobs(tokens, adapter)
    assert np.abs(expected - reference.logprobs(tokens)).max() > 0.05
    difference = np.abs(np.array(completion.logprobs) - expected[len(PROMPT) - 1 :])
    assert difference.max() < 1e-4
    assert difference.mean() < 1e-5
    np.testing.assert_allclose((await engine.compute_logprobs(tokens, adapter, ""))[1:], expected, atol=1e-4)
    await engine.remove_adapter(adapter)


async def test_tensors_that_lie_at_odd_places_in_the_file_are_read_as_they_are(engine, make_adapter):
    adapter = make_adapter()
    await engine.add_adapter(adapter)
    tokens = PROMPT * 2
    expected = await engine.compute_logprobs(tokens, adapter, "")
    odd = Adapter(next(IDS), "odd", adapter.path.with_name("odd"), in_memory=True)
    shutil.copytree(adapter.path, odd.path)
    file = odd.path / WEIGHTS_FILE
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    await engine.add_adapter(odd)
    np.testing.assert_array_equal(await engine.compute_logprobs(tokens, odd, ""), expected)
    for one_of_them in (adapter, odd):
        await engine.remove_adapter(one_of_them)


async def test_adapters_and_base_in_one_batch_each_get_their_own(engine, reference, make_adapter):
    adapters = [None, make_adapter(rank=8), make_adapter(rank=2)]
    for adapter in adapters[1:]:
        await engine.add_adapter(adapter)
    requests = [ask(max_tokens=10, seed=i, adapter=adapters[i % 3], ignore_eos=True) for i in range(9)]
    for request, completion in zip(requests, await asyncio.gather(*(one(engine, r) for r in requests)), strict=True):
        expected = reference.logprobs(PROMPT + completion.tokens, request.adapter)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    for adapter in adapters[1:]:
        await engine.remove_adapter(adapter)


async def test_prompts_in_one_batch_are_each_scored_with_their_own_head(engine, reference, make_adapter):
    adapters = [make_adapter(targets=HEAD), None, make_adapter(targets=["lm_head"])]
    for adapter in (adapters[0], adapters[2]):
        await engine.add_adapter(adapter)
    prompts = [(PROMPT * 3)[i : i + 7 + 2 * i] for i in range(9)]
    asked = [(prompt, adapters[i % 3]) for i, prompt in enumerate(prompts)]
    scored = await asyncio.gather(*(engine.compute_logprobs(prompt, adapter, "") for prompt, adapter in asked))
    for (prompt, adapter), logprobs in zip(asked, scored, strict=True):
        np.testing.assert_allclose(logprobs[1:], reference.logprobs(prompt, adapter), atol=1e-4)
    for adapter in (adapters[0], adapters[2]):
        await engine.remove_adapter(adapter)


async def test_more_adapters_than_one_step_can_mix_take_turns(engine, reference, make_adapter):
    adapters = [make_adapter() for _ in range(4)]
    for adapter in adapters:
        await engine.add_adapter(adapter)
    requests = [ask(max_tokens=6, seed=1, adapter=adapter, ignore_eos=True) for adapter in adapters]
    for request, completion in zip(requests, await asyncio.gather(*(one(engine, r) for r in requests)), strict=True):
        expected = reference.logprobs(PROMPT + completion.tokens, request.adapter)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    for adapter in adapters:
        await engine.remove_adapter(adapter)


async def test_an_adapter_that_goes_with_its_cancelled_request_harms_no_other(model_path, make_adapter):
    engine, adapter = create_engine("hf", options_for(model_path)), make_adapter()
    await engine.start()
    await engine.add_adapter(adapter)
    batcher = engine._loaded.batcher
    leaving, other = (Job(ask(max_tokens=8, ignore_eos=True, adapter=one), 8) for one in (adapter, None))
    assert len(batcher.step([leaving, other])) == 2
    leaving.cancelled = True
    await engine.remove_adapter(adapter)
    assert [job for job, _ in batcher.step([])] == [other]
    await engine.stop()


async def test_an_adapter_comes_back_under_a_new_id_and_an_unknown_one_may_be_removed(engine, make_adapter):
    adapter = make_adapter()
    await engine.add_adapter(adapter)
    first = await engine.compute_logprobs(PROMPT, adapter, "")
    await engine.remove_adapter(adapter)
    await engine.remove_adapter(adapter)
    again = Adapter(next(IDS), "run@again", adapter.path)
    await engine.add_adapter(again)
    np.testing.assert_allclose((await engine.compute_logprobs(PROMPT, again, ""))[1:], first[1:], atol=1e-6)
    await engine.remove_adapter(again)


async def test_an_adapter_can_be_added_while_others_are_sampled(engine, reference, make_adapter):
    running = asyncio.create_task(one(engine, ask(max_tokens=60, seed=1, ignore_eos=True)))
    for _ in range(3):
        adapter = make_adapter()
        await engine.add_adapter(adapter)
        await engine.remove_adapter(adapter)
    completion = await running
    expected = reference.logprobs(PROMPT + completion.tokens)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_an_adapter_that_would_be_cut_or_left_out_is_refused(engine, model_path, make_adapter, tmp_path):
    with pytest.raises(RankTooLarge):
        await engine.add_adapter(make_adapter(rank=9))
    other = AutoModelForCausalLM.from_pretrained(model_path, num_hidden_layers=3)
    other.save_pretrained(tmp_path / "deeper")
    with pytest.raises(InvalidShape, match=r"layers\.2"):
        await engine.add_adapter(make_adapter(base=tmp_path / "deeper"))
    narrow = AutoModelForCausalLM.from_pretrained(model_path, intermediate_size=96, ignore_mismatched_sizes=True)
    narrow.save_pretrained(tmp_path / "narrow")
    with pytest.raises(InvalidShape, match="96"):
        await engine.add_adapter(make_adapter(base=tmp_path / "narrow"))
    embedding = make_adapter(targets=["embed_tokens"])
    with pytest.raises(InvalidShape):
        await engine.add_adapter(embedding)


async def test_an_adapter_whose_files_are_removed_while_it_is_loaded_is_no_failure_of_the_engine(
    engine, make_adapter, monkeypatch
):
    """The files go after vLLM's caller has looked at them, before its workers do."""
    gone, adapter = make_adapter(), make_adapter()

    def read(directory):
        shapes = read_adapter(directory)
        shutil.rmtree(directory)
        return shapes

    with monkeypatch.context() as patch:
        if engine.name == "vllm":
            patch.setattr("sampler_service.engine.vllm.engine.read_adapter", read)
        else:
            shutil.rmtree(gone.path)
        with pytest.raises(FileNotFoundError):
            await engine.add_adapter(gone)
    with pytest.raises(VersionNotFound):
        await one(engine, ask(adapter=gone))
    await engine.add_adapter(adapter)
    assert (await one(engine, ask(adapter=adapter, max_tokens=2, ignore_eos=True))).tokens
    await engine.remove_adapter(adapter)
