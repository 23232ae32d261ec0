"""Validates every sampling request, by its numbers and names only, before anything changes.

Every field of a call of OpenAI's API is either honoured or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline import errors
from paceline.chat import check_length, check_messages, read_chat_body
from paceline.layout import CheckpointPath, check_run_id
from paceline.types import CheckpointKind, ModelInfo, ModelRef, SamplingParams
from paceline.types.training import Array
from sampler_service.engine.protocol import TextEndpoint
from sampler_service.engine.request_checks import check_constraint

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises temperatures between 0 (greedy) and the minimum to 0.01, and refuses those above the maximum."""
_MAX_SEED = 2**64 - 1
_MAX_STOPS = 64
_MAX_STOP_LENGTH = 1024

_BOTH = frozenset(
    {"model", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "max_tokens",
     "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "stop_token_ids",
     "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
     "add_special_tokens", "response_format", "structured_outputs", "allowed_token_ids", "bad_words",
     "return_token_ids", "return_tokens_as_token_ids"}
)  # fmt: skip
_FIELDS = {
    TextEndpoint.COMPLETIONS: _BOTH | {"prompt", "echo"},
    TextEndpoint.CHAT_COMPLETIONS: _BOTH
    | {"messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls",
       "reasoning_effort", "include_reasoning", "add_generation_prompt", "continue_final_message",
       "chat_template_kwargs"},
}  # fmt: skip
_MEANINGLESS = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields for the hosted service's own use. They do not affect the response, so they are ignored."""
_FORMATS = ("text", "json_object", "json_schema")
_CONSTRAINTS = frozenset({"json", "regex", "choice", "json_object"})
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for completions of one prompt, decoded but not yet validated."""

    ref: ModelRef
    prompt: Array
    """int32 or int64, shape [P]."""
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0


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
    check_num_samples(request.num_samples, limits, "num_samples")
    for name in ("topk_logprobs", "topk_prompt_logprobs"):
        _check_range(getattr(request, name), name, 0, min(limits.max_topk, limits.model.vocab_size))
    _check_params(request.params, len(request.prompt), limits.model)


def check_num_samples(count: int, limits: RequestLimits, field: str) -> None:
    """Check the number of completions of one prompt. Raises OutOfRange."""
    if not 1 <= count <= limits.max_num_samples:
        raise errors.OutOfRange(f"is {count}; at most {limits.max_num_samples}", field=field)


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


def read_body(content: bytes, endpoint: TextEndpoint, max_context_length: int) -> dict[str, Any]:
    """Parse and check the body of a call of OpenAI's API; return its fields.

    Raises UnreadableMessage, UnknownField, Unsupported, InvalidArgument, SequenceTooLong.
    """
    body = read_chat_body(content)
    given = {name: value for name, value in body.items() if value is not None and name not in _MEANINGLESS}
    for name in given:
        if name not in _FIELDS[endpoint]:
            raise errors.UnknownField("is not served; leave it out", field=name[:80])
    if given.get("echo") and given.get("logprobs") is not None:
        raise errors.Unsupported("cannot be combined with logprobs; leave out one of them", field="echo")
    _check_format(given)
    if "messages" in given:
        check_messages(given["messages"])
    _check_template_kwargs(given.get("chat_template_kwargs", {}))
    field = "messages" if endpoint is TextEndpoint.CHAT_COMPLETIONS else "prompt"
    check_length(field, [given.get("messages"), given.get("prompt"), given.get("tools")], max_context_length)
    return given


def _check_params(params: SamplingParams, prompt_length: int, model: ModelInfo) -> None:
    """Check sampling parameters for a prompt of `prompt_length` tokens."""
    _check_max_tokens(params, model.max_context_length - prompt_length)
    _check_temperature(params.temperature)
    _check_range(params.top_p, "params.top_p", 0.0, 1.0, low_open=True)
    _check_range(params.min_p, "params.min_p", 0.0, 1.0)
    _check_range(params.top_k, "params.top_k", 0, model.vocab_size)
    if params.seed is not None:
        _check_range(params.seed, "params.seed", 0, _MAX_SEED)
    _check_stops(params.stop, params.stop_token_ids, model)
    check_constraint(params)


def _check_max_tokens(params: SamplingParams, left: int) -> None:
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


def _check_format(given: dict[str, Any]) -> None:
    """Check that constraints on the response are of a kind that is enforced."""
    form = given.get("response_format", {"type": "text"})
    if not isinstance(form, dict) or form.get("type") not in _FORMATS:
        raise errors.InvalidArgument(f"must have one of the types {', '.join(_FORMATS)}", field="response_format")
    constraint = given.get("structured_outputs", {})
    if not isinstance(constraint, dict) or constraint.keys() - _CONSTRAINTS:
        raise errors.InvalidArgument(f"may only have {', '.join(sorted(_CONSTRAINTS))}", field="structured_outputs")


def _check_template_kwargs(given: Any) -> None:
    if not isinstance(given, dict):
        raise errors.InvalidArgument("must be an object", field="chat_template_kwargs")
    for name, value in given.items():
        if name in {"chat_template", "tokenize"} or not isinstance(value, _SCALARS):
            raise errors.UnknownField("is not served; leave it out", field=f"chat_template_kwargs.{name[:80]}")
