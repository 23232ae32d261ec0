"""Validates every request, by its numbers and names only, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import errors
from paceline.layout import CheckpointPath, check_run_id
from paceline.types import CheckpointKind, ModelInfo, ModelRef, SamplingParams
from paceline.types.training import Array
from sampler_service.engine.constraints import check_constraint
from sampler_service.requests.request import SampleRequest

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises temperatures between 0 (greedy) and the minimum to 0.01, and refuses those above the maximum."""
_MAX_SEED = 2**64 - 1
_MAX_STOPS = 64
_MAX_STOP_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    model: ModelInfo
    max_num_samples: int
    max_topk: int
    max_unread_tokens: int
    """Most tokens of a stream that may wait for its reader."""


def check_sample(request: SampleRequest, limits: RequestLimits) -> None:
    """Check a request for completions."""
    check_ref(request.ref, limits.model)
    check_tokens(request.prompt, "prompt", limits.model, room=1)
    if not 1 <= request.num_samples <= limits.max_num_samples:
        raise errors.OutOfRange(f"is {request.num_samples}; at most {limits.max_num_samples}", field="num_samples")
    for name in ("topk_logprobs", "topk_prompt_logprobs"):
        _check_range(getattr(request, name), name, 0, min(limits.max_topk, limits.model.vocab_size))
    check_params(request.params, len(request.prompt), limits.model)


def check_amounts(completions: int, limits: RequestLimits) -> None:
    """Check the number of completions of one prompt. Raises OutOfRange."""
    if not 1 <= completions <= limits.max_num_samples:
        raise errors.OutOfRange(f"is {completions}; at most {limits.max_num_samples}", field="n")


def check_ref(ref: ModelRef, model: ModelInfo) -> None:
    """Check a reference to weights. Raises ModelNotFound, RunNotFound, InvalidPath."""
    if ref.is_base and ref.base not in {"", model.name}:
        raise errors.ModelNotFound(f"only {model.name} is served here", field="model.base.name")
    if ref.run_id:
        check_run_id(ref.run_id, "model.version.run_id")
    if ref.checkpoint and CheckpointPath.parse(ref.checkpoint, "model.checkpoint").kind is not CheckpointKind.SAMPLER:
        raise errors.InvalidPath("is a state checkpoint; sample from a sampler checkpoint", field="model.checkpoint")


def check_adapter_ref(ref: ModelRef, model: ModelInfo) -> None:
    """Check a reference to a version or a checkpoint; the base model is refused."""
    if ref.is_base:
        raise errors.InvalidArgument("is the base model; name a version or a checkpoint", field="model")
    check_ref(ref, model)


def check_tokens(tokens: Array, field: str, model: ModelInfo, *, room: int = 0) -> None:
    """Check token ids of shape [N], N >= 1, which must leave `room` tokens of the context."""
    longest = model.max_context_length - room
    if len(tokens) > longest:
        raise errors.SequenceTooLong(f"has {len(tokens)} tokens; send at most {longest}", field=field)
    if tokens.min() < 0 or tokens.max() >= model.vocab_size:
        raise errors.TokenOutOfRange(f"holds an id outside 0 to {model.vocab_size - 1}", field=field)


def check_params(params: SamplingParams, prompt_length: int, model: ModelInfo) -> None:
    """Check sampling parameters for a prompt of `prompt_length` tokens."""
    _check_length(params, model.max_context_length - prompt_length)
    _check_temperature(params.temperature)
    _check_range(params.top_p, "params.top_p", 0.0, 1.0, low_open=True)
    _check_range(params.min_p, "params.min_p", 0.0, 1.0)
    _check_range(params.top_k, "params.top_k", 0, model.vocab_size)
    if params.seed is not None:
        _check_range(params.seed, "params.seed", 0, _MAX_SEED)
    _check_stops(params.stop, params.stop_token_ids, model)
    check_constraint(params)


def _check_length(params: SamplingParams, left: int) -> None:
    if params.max_tokens == 0:
        raise errors.OutOfRange("is 0; leave it unset for no limit but the context", field="params.max_tokens")
    if params.max_tokens is not None and params.max_tokens > left:
        raise errors.SequenceTooLong(
            f"is {params.max_tokens}; the prompt leaves {left} tokens of the context", field="params.max_tokens"
        )
    _check_range(params.min_tokens, "params.min_tokens", 0, params.max_tokens or left)


def _check_temperature(temperature: float) -> None:
    _check_range(temperature, "params.temperature", 0.0, _MAX_TEMPERATURE)
    # Tolerate 0.01 rounded to float32 in transit.
    if 0 < temperature < _MIN_TEMPERATURE * (1 - 1e-6):
        raise errors.OutOfRange(
            f"is {temperature}; take 0 (greedy) or at least {_MIN_TEMPERATURE}", field="params.temperature"
        )


def _check_stops(stop: Sequence[str], stop_token_ids: Sequence[int], model: ModelInfo) -> None:
    if max(len(stop), len(stop_token_ids)) > _MAX_STOPS:
        raise errors.OutOfRange(f"takes at most {_MAX_STOPS} entries", field="params.stop")
    for index, text in enumerate(stop):
        if not 0 < len(text) <= _MAX_STOP_LENGTH:
            raise errors.OutOfRange(f"must have 1 to {_MAX_STOP_LENGTH} characters", field=f"params.stop[{index}]")
    for index, token in enumerate(stop_token_ids):
        if token >= model.vocab_size:
            raise errors.TokenOutOfRange(
                f"is {token}; ids are below {model.vocab_size}", field=f"params.stop_token_ids[{index}]"
            )


def _check_range(value: float, field: str, low: float, high: float, *, low_open: bool = False) -> None:
    if not math.isfinite(value):
        raise errors.NonFinite("must be a finite number", field=field)
    if not low <= value <= high or (low_open and value == low):
        raise errors.OutOfRange(
            f"is {value}; it must be {'above' if low_open else 'from'} {low} to {high}", field=field
        )
