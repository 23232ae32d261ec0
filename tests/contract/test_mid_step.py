"""Adapters reach vLLM's workers during a step."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from support.patience import PATIENCE
from support.stacks.sampler_contract import IDS, PROMPT, options_for
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from sampler_service.engine.vllm.engine import engine_args
from sampler_service.engine.vllm.params import lora_request, prompt_input, prompt_logprobs, scoring_params
from sampler_service.engine.vllm.worker.side_channel import Load, Loaded, MidStepCalls, MidStepInbox

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Vllm:
    """vLLM's engine with the worker extension, and mid-step calls without vLLM's own call beside them."""

    def __init__(self, llm: AsyncLLM, calls: MidStepCalls) -> None:
        self.llm = llm
        self.calls = calls

    @asynccontextmanager
    async def stepping(self, adapter=None):
        """Keep the engine computing steps while the block runs."""
        streams = asyncio.create_task(self._stream(adapter))
        try:
            yield
        finally:
            streams.cancel()
            await asyncio.gather(streams, return_exceptions=True)

    async def load_mid_step(self, load: Load) -> Loaded:
        async with asyncio.timeout(PATIENCE):
            return (await self.calls.load(load, 1))[0]

    async def load_between_steps(self, load: Load) -> Loaded:
        return Loaded(*(await self.llm.collective_rpc("load_adapter", args=tuple(load)))[0])

    async def logprobs(self, adapter) -> np.ndarray:
        outputs = self.llm.generate(prompt_input(PROMPT, ""), scoring_params(0), f"score-{next(IDS)}",
                                    lora_request=lora_request(adapter))  # fmt: skip
        async with aclosing(outputs):
            return prompt_logprobs(PROMPT, (await anext(outputs)).prompt_logprobs)

    async def _stream(self, adapter) -> None:
        params = SamplingParams(max_tokens=90, ignore_eos=True, detokenize=False)
        while True:
            request = lora_request(adapter) if adapter else None
            async for _ in self.llm.generate(prompt_input(PROMPT, ""), params, f"stream-{next(IDS)}",
                                             lora_request=request):  # fmt: skip
                pass


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm(model_path, vllm_here):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        llm = await asyncio.to_thread(
            AsyncLLM.from_engine_args, engine_args(replace(options_for(model_path), dtype="bfloat16"))
        )
    calls = MidStepCalls()
    await calls.start()
    await llm.collective_rpc("prepare_adapters", kwargs={"direct": True, "mid_step": calls.address})
    yield Vllm(llm, calls)
    await calls.close()
    llm.shutdown()


def load_of(adapter) -> Load:
    return Load(next(IDS), adapter.adapter_id, adapter.name, str(adapter.path), in_memory=True)


async def test_an_adapter_that_comes_during_a_step_is_the_one_that_comes_between_two(vllm, make_adapter):
    running, adapter = make_adapter(), make_adapter()
    again = replace(adapter, adapter_id=next(IDS), name="again")
    await vllm.load_between_steps(load_of(running))
    async with vllm.stepping(running):
        assert (await vllm.load_mid_step(load_of(adapter))).in_slot
    await vllm.load_between_steps(load_of(again))
    np.testing.assert_array_equal(await vllm.logprobs(adapter), await vllm.logprobs(again))
    assert not np.array_equal(await vllm.logprobs(adapter), await vllm.logprobs(running))


async def test_it_leaves_the_slots_of_running_requests(vllm, make_adapter):
    """One of the two slots belongs to a running request, so each new adapter takes the other one."""
    running = make_adapter()
    await vllm.load_between_steps(load_of(running))
    before = await vllm.logprobs(running)
    async with vllm.stepping(running):
        for _ in range(3):
            assert (await vllm.load_mid_step(load_of(make_adapter()))).in_slot
        np.testing.assert_array_equal(await vllm.logprobs(running), before)


async def test_what_cannot_be_loaded_is_told_by_vllms_own_call_and_ends_no_step(vllm, make_adapter):
    broken, sound = make_adapter(), make_adapter()
    (broken.path / "adapter_model.safetensors").unlink()
    load = load_of(broken)
    async with vllm.stepping():
        answer = asyncio.create_task(vllm.load_mid_step(load))
        await vllm.load_mid_step(load_of(sound))
        assert not answer.done()
        with pytest.raises(Exception, match=r"adapter_model\.safetensors"):
            await vllm.load_between_steps(load)
        answer.cancel()


async def test_what_vllms_call_was_first_with_does_not_come_back(vllm, make_adapter):
    early, late = load_of(make_adapter()), load_of(make_adapter())
    asked = asyncio.create_task(vllm.load_mid_step(early))
    await asyncio.sleep(0)
    assert (await vllm.load_between_steps(early)).in_slot
    await vllm.llm.remove_lora(early.adapter_id)
    async with vllm.stepping():
        await vllm.load_mid_step(late)
    assert not asked.done()
    held = set(await vllm.llm.list_loras())
    assert late.adapter_id in held
    assert early.adapter_id not in held
    asked.cancel()


async def test_a_worker_that_does_not_listen_is_waited_for_in_vain():
    calls = MidStepCalls()
    await calls.start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await calls.load(Load(1, 1, "a", "/a", in_memory=True), 1)
    await calls.close()


async def test_only_the_same_user_is_let_in(monkeypatch):
    calls = MidStepCalls()
    await calls.start()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user"):
        await asyncio.to_thread(MidStepInbox, calls.address, lambda load: Loaded(0.0, in_slot=True))
    reader, writer = await asyncio.open_unix_connection(f"\0{calls.address}")
    assert await reader.read() == b""
    writer.close()
    await calls.close()
