"""Checks at startup of what makes a model faster: that it changes no result.

They are torch's attention in place of the model's own formula, and a KV cache that sequences of unequal length share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from paceline.types import SamplingParams
from sampler_service.engine.hf.batch import Batcher, Job
from sampler_service.engine.protocol import GenerationRequest

_TEXT = "The capital of Peru is Lima, and that of Chile is Santiago."
_LENGTHS = (3, 12)
_STEPS = 4
_ROUNDING = 8.0
"""Log-probabilities may differ by this many square roots of the dtype's precision."""

_log = logging.getLogger(__name__)


def use_fast_attention(model: PreTrainedModel, encode: Callable[[str], Sequence[int]]) -> None:
    """Switch a model that was loaded with its own formula of attention to torch's, if that computes the same."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return  # torch's ignores it, which shows in long texts alone
    own = _logprobs(model, encode)
    try:
        model.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        return
    if not (_logprobs(model, encode) - own).abs().max() <= _allowed(model):
        model.set_attn_implementation("eager")


def shares_a_cache(model: PreTrainedModel, encode: Callable[[str], Sequence[int]], batcher: Batcher) -> bool:
    """Return whether `batcher`, which uses a KV cache, gives log-probabilities of the model's own distribution."""
    if getattr(model, "_is_stateful", False):  # transformers' mark of models that carry a state
        return False
    tokens = _tokens(model, encode)
    jobs = [
        Job(
            GenerationRequest(f"check-{length}", tokens[:length], SamplingParams(temperature=0.0, ignore_eos=True)),
            _STEPS,
        )
        for length in _LENGTHS
    ]
    try:
        off = _difference(model, jobs, batcher)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises that knows no such cache
        _log.info("%s cannot share a KV cache (%s); its sequences are computed whole", type(model).__name__, error)
        return False
    if off <= _allowed(model):
        return True
    _log.info("%s gives other results with a KV cache; its sequences are computed whole", type(model).__name__)
    return False


def _tokens(model: PreTrainedModel, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Return tokens of plain text, at least as many as the longest sequence has."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = [token % vocabulary for token in encode(_TEXT)] or [0]
    return tokens * math.ceil(max(_LENGTHS) / len(tokens))


def _allowed(model: PreTrainedModel) -> float:
    return _ROUNDING * math.sqrt(torch.finfo(model.dtype).eps)


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, encode: Callable[[str], Sequence[int]]) -> torch.Tensor:
    tokens = torch.tensor(_tokens(model, encode), device=model.device)
    logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@torch.inference_mode()
def _difference(model: PreTrainedModel, jobs: Sequence[Job], batcher: Batcher) -> float:
    """Return the largest difference between the log-probabilities of sampled tokens and those of whole sequences."""
    sampled: dict[Job, list[tuple[int, float]]] = {job: [] for job in jobs}
    for step in range(_STEPS):
        for job, delta in batcher.step(jobs if step == 0 else ()):
            sampled[job] += zip(delta.tokens, delta.logprobs, strict=True)
    off = 0.0
    for job, found in sampled.items():
        tokens = torch.tensor(found, dtype=torch.float64)
        ids = torch.tensor(job.request.prompt + [token for token, _ in found], device=model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(job.request.prompt) - 1 : -1].float()
        whole = logits.log_softmax(-1).gather(1, ids[len(job.request.prompt) :, None])[:, 0].double().cpu()
        off = max(off, float((whole - tokens[:, 1]).abs().max()))
    return off if math.isfinite(off) else math.inf
