"""The engine hf samples from the distribution that transformers gives each sequence alone, whatever it runs beside."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from support.models.tiny_models import VOCAB_SIZE, make_tiny
from transformers import AutoModelForCausalLM

from paceline.types import SamplingParams
from sampler_service.engine.hf.engine import HfEngine
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import GenerationRequest

LENGTHS = (5, 60, 23)
KINDS = {
    "llama": {},
    "mamba": {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
    "lfm2": {},
    "falcon": {"alibi": True},
    "gemma2": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": None, "head_dim": 32},
    "bart": {
        "d_model": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 96,
        "is_decoder": True,
        "is_encoder_decoder": False,
        "init_std": 0.2,
    },
}


@pytest.mark.parametrize("kind", KINDS)
async def test_sequences_that_run_together_are_sampled_as_each_alone(kind, tmp_path):
    engine = HfEngine(EngineOptions(make_tiny(kind, tmp_path, **KINDS[kind]), "tiny", max_model_len=128))
    await engine.start()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE - 4, length).tolist() for length in LENGTHS]

    async def sample(prompt):
        request = GenerationRequest(str(len(prompt)), prompt, SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
        deltas = [delta async for delta in engine.generate(request)]
        return [t for delta in deltas for t in delta.tokens], [lp for delta in deltas for lp in delta.logprobs]

    sampled = await asyncio.gather(*map(sample, prompts))
    await engine.stop()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for prompt, (tokens, logprobs) in zip(prompts, sampled, strict=True):
        with torch.no_grad():
            whole = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = whole.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)
