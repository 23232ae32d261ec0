"""vLLM and the trainer agree on adapters for architecture-specific modules and for mixtures of experts."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import pytest
from support.models.engine_cases import warmed
from support.models.tiny_models import make_tiny, make_tiny_qwen2
from support.stacks.sampler_contract import IDS, PROMPT, options_for

from paceline.errors import InvalidShape
from paceline.types import Datum, ForwardBackwardSpec, LoraConfig
from sampler_service.engine.protocol import Adapter
from sampler_service.engine.vllm.engine import VllmEngine
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("vllm_here")]

TOKENS = PROMPT * 2


@asynccontextmanager
async def sampler_of(directory):
    engine = VllmEngine(options_for(directory))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def trained(directory, lora):
    """Return a trainer with a run that took a step, and one that equals the base model."""
    trainer = PeftEngine(EngineOptions(str(directory), "tiny"))
    trainer.create_run("base", lora)
    trainer.create_run("run", lora)
    return warmed(trainer)


def score(trainer, run_id):
    inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(len(TOKENS) - 1, np.float32)}
    datum = Datum(np.array(TOKENS[:-1], np.int32), inputs)
    output = trainer.forward_backward(run_id, [datum], ForwardBackwardSpec("cross_entropy", forward_only=True))
    return output.loss_fn_outputs[0]["logprobs"]


@pytest.mark.parametrize("kind", ["phi3", "mixtral"])
async def test_the_sampler_serves_what_the_trainer_trained(kind, tmp_path):
    directory = make_tiny(kind, tmp_path / "model")
    trainer = trained(directory, LoraConfig(rank=4, train_mlp=kind != "mixtral"))
    trainer.save_adapter("run", tmp_path)
    async with sampler_of(directory) as engine:
        adapter = Adapter(next(IDS), "run@1", tmp_path)
        base = await engine.compute_logprobs(TOKENS, None, "")
        await engine.add_adapter(adapter)
        tuned = await engine.compute_logprobs(TOKENS, adapter, "")
    np.testing.assert_allclose(base[1:], score(trainer, "base"), atol=1e-4)
    np.testing.assert_allclose(tuned[1:], score(trainer, "run"), atol=1e-4)
    assert np.abs(tuned[1:] - base[1:]).mean() > 1e-2


async def test_modules_that_vllm_cannot_adapt_are_named(tmp_path):
    """GLM-4's gate_up_proj is one module in the checkpoint, but vLLM supports adapters only on its two halves."""
    directory = make_tiny("glm4", tmp_path / "model")
    trained(directory, LoraConfig(rank=4)).save_adapter("run", tmp_path)
    async with sampler_of(directory) as engine:
        with pytest.raises(InvalidShape, match=r"model\.layers\.0\.mlp\.gate_up_proj"):
            await engine.add_adapter(Adapter(next(IDS), "run@1", tmp_path))
        assert np.isfinite((await engine.compute_logprobs(TOKENS, None, ""))[1:]).all()
        fused = {f"model.layers.{layer}.mlp.gate_up_proj" for layer in range(2)}
        assert fused <= set(engine.describe().unserved_modules)


async def test_a_head_without_adapters_is_said_beforehand_and_an_adapter_on_it_refused(tmp_path):
    directory = make_tiny_qwen2(tmp_path / "model")
    trained(directory, LoraConfig(rank=4, train_unembed=True)).save_adapter("run", tmp_path)
    async with sampler_of(directory) as engine:
        assert engine.describe().unserved_modules == ("lm_head",)
        with pytest.raises(InvalidShape, match="vLLM serves no adapter on 1 modules, such as lm_head"):
            await engine.add_adapter(Adapter(next(IDS), "run@1", tmp_path))
