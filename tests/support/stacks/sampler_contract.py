"""Requests to sampler engines, and the same model in plain transformers and PEFT (fp32) to compare answers with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.types import SamplingParams, StopReason
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Adapter, GenerationRequest, SamplerEngine, TokenDelta
from support.models.formulas import log_softmax
from support.models.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer

CONTEXT = 128
PROMPT = list(b"the riders are in file")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = count(1)


@dataclass
class Completion:
    """All deltas of one completion."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: list[np.ndarray] = field(default_factory=list)
    topk_logprobs: list[np.ndarray] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def add(self, delta: TokenDelta) -> None:
        assert self.stop_reason is None, "a delta after the last one"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.stop_reason = delta.stop_reason
        if delta.topk_logprobs is not None:
            self.topk_ids += list(delta.topk_logprobs.token_ids)
            self.topk_logprobs += list(delta.topk_logprobs.logprobs)


class Reference:
    """The same model in plain transformers, fp32."""

    def __init__(self, model_path: Path) -> None:
        self._path = model_path

    def logits(self, tokens: list[int], adapter: Adapter | None = None) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter.path)
        with torch.inference_mode():
            return model.eval()(torch.tensor([tokens])).logits[0].double().numpy()

    def logprobs(self, tokens: list[int], adapter: Adapter | None = None) -> np.ndarray:
        """Return the log-probability of each token but the first, at temperature 1."""
        rows = log_softmax(self.logits(tokens, adapter))
        return rows[np.arange(len(tokens) - 1), tokens[1:]]


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the log-probabilities of one distribution after temperature, min_p, top_k and top_p, in this order."""
    logprobs = log_softmax(logits / params.temperature)
    logprobs[np.exp(logprobs) < params.min_p * np.exp(logprobs.max())] = -np.inf
    order = np.argsort(-logprobs)
    if params.top_k:
        logprobs[order[params.top_k :]] = -np.inf
    mass = np.exp(log_softmax(logprobs))[order]
    logprobs[order[np.cumsum(mass) - mass >= params.top_p]] = -np.inf
    return log_softmax(logprobs)


def make_model(path: Path) -> Path:
    """Save a random Llama with heads of 32, the smallest that vLLM's CPU attention supports; return `path`."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=EOS_ID,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def options_for(model_path: Path) -> EngineOptions:
    return EngineOptions(
        model_path=model_path,
        model_name="tiny",
        dtype="float32",
        max_model_len=CONTEXT,
        max_lora_rank=8,
        max_active_versions=2,
        max_cpu_versions=4,
        kv_cache_gib=0.25,
        enforce_eager=True,
        max_num_seqs=16,
    )


def ask(prompt: list[int] = PROMPT, **changes) -> GenerationRequest:
    fields = {"num_samples", "adapter", "tenant", "priority", "prompt_logprobs"}
    fields |= {"topk_prompt_logprobs", "topk_logprobs"}
    own = {name: changes.pop(name) for name in fields & changes.keys()}
    return GenerationRequest(f"request-{next(IDS)}", prompt, SamplingParams(**changes), **own)


async def deltas_of(engine: SamplerEngine, request: GenerationRequest) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(request)]


async def complete(engine: SamplerEngine, request: GenerationRequest) -> list[Completion]:
    completions = [Completion() for _ in range(request.num_samples)]
    for delta in await deltas_of(engine, request):
        completions[delta.index].add(delta)
    assert all(completion.stop_reason for completion in completions)
    return completions


async def one(engine: SamplerEngine, request: GenerationRequest) -> Completion:
    return (await complete(engine, request))[0]


async def cache_is_free(engine: Any) -> bool:
    """Whether no request holds any of the KV cache, as seen between two scheduler steps."""
    if engine.name == "vllm":
        # Handled in order, before the next step. vLLM resets the prefix cache only if no block is in use.
        return await engine._started.llm.reset_prefix_cache()
    # The first check may come before the step that drops the rows.
    for _ in range(2):
        rows = await asyncio.get_running_loop().run_in_executor(engine._thread, _rows, engine)
    return not rows


def _rows(engine: Any) -> int:
    return sum(len(cohort.rows) for cohort in engine._loaded.batcher._cohorts)
