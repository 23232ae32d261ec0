"""Maps requests and results between the engine's protocol and vLLM 0.32/0.33."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from paceline.types import SamplingParams, StopReason, TopkLogprobs, VersionSpan
from paceline.types.training import Array
from sampler_service.engine.coalescer import Coalescer
from sampler_service.engine.protocol import Adapter, GenerationRequest, TextSampling, TokenDelta, first_seed
from sampler_service.engine.vllm.grammar import structured_outputs

Position = Mapping[int, Logprob]
"""Token id -> log-probability at one position: of the actual token, and of the likeliest ones if requested."""

MIXED = "~"
"""Suffix of vLLM's name for a version that is being written."""

STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
"""vLLM's other reasons (abort, error) are ABORTED, never LENGTH."""


def prompt_input(tokens: list[int], tenant: str) -> TokensInput:
    """Return vLLM's prompt, with the tenant as the salt of its prefix-cache entries."""
    return tokens_input(tokens, cache_salt=tenant or None)


def lora_request(adapter: Adapter) -> LoRARequest:
    """Return vLLM's handle of an adapter. `load_inplace` stays off; it would read the files again at every step."""
    return LoRARequest(lora_name=adapter.name, lora_int_id=adapter.adapter_id, lora_path=str(adapter.path))


def sampling_params(request: GenerationRequest, budget: int) -> VllmSamplingParams:
    """Map the request's parameters; `budget` is the most tokens that may be sampled.

    vLLM detokenizes only for stop strings, whose tokens it keeps.
    """
    params = request.params
    return VllmSamplingParams(
        **_shared_params(params, request.num_samples, budget),
        logprobs=request.topk_logprobs,
        detokenize=bool(params.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        structured_outputs=structured_outputs(params),
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # not shared with other requests
    )


def text_params(sampling: TextSampling, made: VllmSamplingParams, budget: int) -> VllmSamplingParams:
    """Map the parameters of a call of OpenAI's API; what concerns text is that of `made` by vLLM's serving layer.

    Samples of greedy sampling are all the same, and vLLM computes one.
    """
    params = sampling.params
    shared = _shared_params(params, sampling.num_samples if params.temperature > 0 else 1, budget)
    # The layer may have added tokens that end an answer in the model's format.
    shared["stop_token_ids"] += made.stop_token_ids or []
    mapped: VllmSamplingParams = msgspec.structs.replace(
        made,
        **shared,
        logprobs=sampling.topk_logprobs or 0,  # at least of sampled tokens, so that NaN is detected
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        bad_words=list(sampling.bad_words),
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
    )
    return mapped


def _shared_params(params: SamplingParams, num_samples: int, budget: int) -> dict[str, Any]:
    """Map the parameters that every API has. vLLM gives sample i the first sample's seed plus i."""
    return {
        "n": num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": None if params.seed is None else first_seed(params.seed),
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "min_tokens": params.min_tokens,
        "max_tokens": budget,
    }


def scoring_params(k: int) -> VllmSamplingParams:
    """Return parameters that yield a sequence's log-probabilities at temperature 1. One token is sampled and dropped.

    vLLM computes the whole sequence of such a request, without using the prefix cache.
    """
    return VllmSamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=k, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def token_delta(completion: CompletionOutput, k: int) -> TokenDelta:
    """Convert a completion's new tokens; each one's log-probability is looked up by its id."""
    tokens = list(completion.token_ids)
    positions: list[Position] = [*(completion.logprobs or ())]
    reason = completion.finish_reason
    return TokenDelta(
        index=completion.index,
        tokens=tokens,
        logprobs=[position[token].logprob for token, position in zip(tokens, positions, strict=True)],
        stop_reason=None if reason is None else STOP_REASONS.get(reason, StopReason.ABORTED),
        topk_logprobs=topk_rows(positions, k) if k else None,
        version_spans=version_spans(completion),
    )


def put_tokens(output: RequestOutput, topk: int, tokens: Coalescer) -> None:
    """Put a step's tokens, as converted by vLLM, into the coalescer."""
    for completion in output.outputs:
        delta = token_delta(completion, topk)
        delta.prompt_cache_hit_tokens = output.num_cached_tokens or 0
        tokens.put(delta)


def version_spans(completion: CompletionOutput) -> tuple[VersionSpan, ...]:
    """Return which version each token of a finished completion is of; empty if the weights have no version."""
    spans = [(span.version.removesuffix(MIXED), span) for span in completion.weight_versions or ()]
    return tuple(
        VersionSpan(int(number), span.start, mixed=span.version.endswith(MIXED))
        for number, span in spans
        if number.isdecimal()
    )


def prompt_logprobs(tokens: Sequence[int], positions: Sequence[Position | None]) -> Array:
    """Return the log-probability of each of N prompt tokens: float32, shape [N], NaN at 0."""
    row = np.full(len(tokens), np.nan, np.float32)
    for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        if position is not None:
            row[i] = position[token].logprob
    return row


def topk_rows(positions: Iterable[Position | None], k: int) -> TopkLogprobs:
    """Return the k likeliest tokens of each position, without those removed by filters, padded with -1 and NaN."""
    ids: list[list[int]] = []
    values: list[list[float]] = []
    for position in positions:
        known = [(token, entry.logprob) for token, entry in (position or {}).items() if entry.logprob > -math.inf]
        best = heapq.nlargest(k, known, key=lambda pair: pair[1])
        ids.append([token for token, _ in best] + [-1] * (k - len(best)))
        values.append([value for _, value in best] + [math.nan] * (k - len(best)))
    return TopkLogprobs(np.array(ids, np.int32).reshape(-1, k), np.array(values, np.float32).reshape(-1, k))
