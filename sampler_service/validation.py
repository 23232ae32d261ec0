"""Validates every sampling request, by its numbers and names only, before anything changes.

The limits are the same for every API: whatever samples passes `check_sampling`. Every field of a call of OpenAI's API
is either honoured or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline import errors
from paceline.chat.bodies import check_length, read_chat_body
from paceline.chat.messages import TEMPLATE_KWARGS, read_messages, read_template_kwargs, read_tools
from paceline.layout import CheckpointPath, check_run_id
from paceline.spans import span
from paceline.types import CheckpointKind, ModelInfo, ModelRef, SamplingParams
from paceline.types.training import Array, check_vocabulary
from sampler_service.engine.protocol import TextEndpoint, TextSampling
from sampler_service.engine.request_checks import check_constraint
from sampler_service.openai_formats import check_format, check_stream
from sampler_service.openai_sampling import MAX_ALLOWED, SAMPLED, count_prompts, named_as_sent, read_sampling

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises temperatures between 0 (greedy) and the minimum to 0.01, and refuses those above the maximum."""
_MAX_SEED = 2**64 - 1
_MAX_TEXTS = 64
_MAX_TEXT_LENGTH = 1024
"""Of a stop string and of a bad word."""
_MAX_STOP_TOKENS = 64
_MAX_PENALTY, _MAX_REPETITION = 2.0, 10.0
_MAX_BIAS, _MAX_BIASES = 100.0, 1024
"""vLLM silently cuts larger biases off."""
_MAX_REPLY_BYTES = 48 << 20
"""Most bytes of the likeliest tokens in a reply, which has to fit a message between the services."""
_VALUE_BYTES, _VALUE_BYTES_IN_JSON = 8, 96
"""What a token and its log-probability take in a reply."""

_BOTH = (SAMPLED - {"max_completion_tokens", "prompt_logprobs"}) | {
    "model", "logprobs", "n", "stream", "stream_options", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "add_special_tokens", "response_format", "structured_outputs", "return_token_ids",
    "return_tokens_as_token_ids",
}  # fmt: skip
_FIELDS = {
    TextEndpoint.COMPLETIONS: _BOTH | {"prompt", "echo", "prompt_logprobs"},
    TextEndpoint.CHAT_COMPLETIONS: _BOTH
    | {"messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls",
       "reasoning_effort", "include_reasoning", "add_generation_prompt", "continue_final_message",
       "chat_template_kwargs"},
}  # fmt: skip
_MEANINGLESS = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields for the hosted service's own use. They do not affect the response, so they are ignored."""
_PROMPTS = "a text, token ids, or a list of either"


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
class TextBody:
    """The body of a call of OpenAI's API, checked."""

    sent: dict[str, Any]
    """All fields that the caller set."""
    fields: dict[str, Any]
    """Those for vLLM's serving layer."""
    sampling: TextSampling


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
    check_tokens(request.prompt, "prompt", limits.model, reserved=1)
    _check_topk(request.topk_prompt_logprobs, "topk_prompt_logprobs", limits)
    left = limits.model.max_context_length - len(request.prompt)
    check_sampling(request.params, request.num_samples, request.topk_logprobs, left, limits)
    values = request.num_samples * (request.params.max_tokens or left) * request.topk_logprobs
    _check_reply(values * _VALUE_BYTES, "topk_logprobs")


def check_sampling(
    params: SamplingParams, num_samples: int, topk_logprobs: int, left: int, limits: RequestLimits, prompts: int = 1
) -> None:
    """Check what a request of any API asks to be sampled from prompts that leave `left` tokens of the context.

    Raises OutOfRange, NonFinite, TokenOutOfRange, SequenceTooLong, InvalidArgument.
    """
    most = limits.max_num_samples
    if not 1 <= num_samples <= most:
        raise _out_of_range(num_samples, f"give {span(1, most, '')}", "num_samples", 1, most)
    if prompts * num_samples > most:
        message = f"has {prompts} prompts, with {num_samples} completions of each; at most {most} completions in all"
        raise errors.OutOfRange.of_length(range(prompts), most // num_samples, message, "prompt")
    _check_topk(topk_logprobs, "topk_logprobs", limits)
    _check_max_tokens(params, left)
    _check_temperature(params.temperature)
    _check_range(params.top_p, "params.top_p", 0.0, 1.0, low_open=True)
    _check_range(params.min_p, "params.min_p", 0.0, 1.0)
    _check_range(params.top_k, "params.top_k", 0, limits.model.vocab_size)
    if params.seed is not None:
        _check_range(params.seed, "params.seed", 0, _MAX_SEED)
    _check_texts(params.stop, "params.stop")
    _check_token_ids(params.stop_token_ids, "params.stop_token_ids", _MAX_STOP_TOKENS, limits.model)
    check_constraint(params)


def check_ref(ref: ModelRef, model: ModelInfo) -> None:
    """Check a reference to weights. Raises ModelNotFound, RunNotFound, InvalidPath."""
    if ref.is_base and ref.base not in {"", model.name}:
        raise errors.ModelNotFound.of(model.name, "model.base.name")
    if ref.run_id:
        check_run_id(ref.run_id, "model.version.run_id")
    if ref.checkpoint and CheckpointPath.parse(ref.checkpoint, "model.checkpoint").kind is not CheckpointKind.SAMPLER:
        raise errors.InvalidPath("is a state checkpoint; sample from a sampler checkpoint", field="model.checkpoint")


def check_adapter_ref(ref: ModelRef, model: ModelInfo) -> None:
    """Check a reference to a version or a checkpoint; the base model is refused."""
    if ref.is_base:
        raise errors.InvalidArgument("is the base model; name a version or a checkpoint", field="model")
    check_ref(ref, model)


def check_tokens(tokens: Array, field: str, model: ModelInfo, *, reserved: int = 0) -> None:
    """Check token ids of shape [N], N >= 1, which must leave `reserved` tokens of the context."""
    longest = model.max_context_length - reserved
    if len(tokens) > longest:
        raise errors.SequenceTooLong(f"has {len(tokens)} tokens; send at most {longest}", field=field)
    check_vocabulary(tokens, model.vocab_size, field)


def read_body(content: bytes, endpoint: TextEndpoint, limits: RequestLimits) -> TextBody:
    """Parse and check the body of a call of OpenAI's API.

    Raises UnreadableMessage, UnknownField, Unsupported, and what `check_sampling` raises, with the names of the body.
    """
    body = read_chat_body(content)
    given = {name: value for name, value in body.items() if value is not None and name not in _MEANINGLESS}
    for name in given:
        if name not in _FIELDS[endpoint]:
            raise errors.UnknownField("is not served; leave it out", field=name[:80])
    if given.get("echo") and given.get("logprobs") is not None:
        raise errors.Unsupported("cannot be combined with logprobs; leave out one of them", field="echo")
    if given.get("stream") and "prompt_logprobs" in given:
        raise errors.Unsupported("cannot be streamed; leave out one of the two", field="prompt_logprobs")
    check_format(given)
    check_stream(given)
    if endpoint is TextEndpoint.CHAT_COMPLETIONS:
        given["messages"] = read_messages(given.get("messages"))
    else:
        _check_prompts(given.get("prompt"), limits)
    if "tools" in given:
        given["tools"] = read_tools(given["tools"])
    read_template_kwargs(given.get(TEMPLATE_KWARGS))
    field = "messages" if endpoint is TextEndpoint.CHAT_COMPLETIONS else "prompt"
    texts = [given.get("messages"), given.get("prompt"), given.get("tools")]
    check_length(field, texts, limits.model.max_context_length)
    sampling = read_sampling(given, endpoint)
    with named_as_sent(given):
        _check_text_sampling(sampling, count_prompts(given), limits, is_stream=bool(given.get("stream")))
    return TextBody(given, {name: value for name, value in given.items() if name not in SAMPLED}, sampling)


def _check_prompts(given: Any, limits: RequestLimits) -> None:
    """Check the prompts of a completion: a text, token ids, or a list of either."""
    if given is None:
        raise errors.MissingField(f"is not set; give {_PROMPTS}", field="prompt")
    is_list = isinstance(given, list)
    prompts = given if is_list and given and isinstance(given[0], list) else [given]
    for index, prompt in enumerate(prompts):
        field = "prompt" if prompts is not given else f"prompt[{index}]"
        if not isinstance(prompt, str if not is_list else list):
            raise errors.InvalidArgument.must_be(_PROMPTS, field)
        if not prompt:
            raise errors.OutOfRange.of_length(prompt, limits.max_num_samples, f"is empty; give {_PROMPTS}", field)
        if isinstance(prompt, str) or (prompt is given and all(isinstance(text, str) for text in prompt)):
            continue
        if not all(type(token) is int for token in prompt):
            raise errors.InvalidArgument.must_be(_PROMPTS, field)
        _check_ids(prompt, field, limits.model)


def _check_text_sampling(sampling: TextSampling, prompts: int, limits: RequestLimits, *, is_stream: bool) -> None:
    """Check what a call of OpenAI's API asks to be sampled from each of its prompts, whose length is not known yet."""
    topk, left = sampling.topk_logprobs, limits.model.max_context_length - 1
    check_sampling(sampling.params, sampling.num_samples, topk or 0, left, limits, prompts)
    if topk is not None and not is_stream:
        values = prompts * sampling.num_samples * (sampling.params.max_tokens or left) * (topk + 1)
        _check_reply(values * _VALUE_BYTES_IN_JSON, "topk_logprobs")
    _check_topk(sampling.prompt_logprobs or 0, "topk_prompt_logprobs", limits)
    for name in ("frequency_penalty", "presence_penalty"):
        _check_range(getattr(sampling, name), name, -_MAX_PENALTY, _MAX_PENALTY)
    _check_range(sampling.repetition_penalty, "repetition_penalty", 1 / _MAX_REPETITION, _MAX_REPETITION)
    _check_token_ids(list(sampling.logit_bias), "logit_bias", _MAX_BIASES, limits.model)
    for bias in sampling.logit_bias.values():
        _check_range(bias, "logit_bias", -_MAX_BIAS, _MAX_BIAS)
    _check_texts(sampling.bad_words, "bad_words")
    _check_token_ids(sampling.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED, limits.model)


def _check_topk(count: int, field: str, limits: RequestLimits) -> None:
    _check_range(count, field, 0, min(limits.max_topk, limits.model.vocab_size))


def _check_reply(size: int, field: str) -> None:
    """Check that a reply's log-probabilities can be sent when they are there."""
    if size > _MAX_REPLY_BYTES:
        message = f"may take {size >> 20} MiB of the answer, of {_MAX_REPLY_BYTES >> 20}; ask for fewer, for fewer "
        raise errors.OutOfRange(f"{message}completions, or for a lower max_tokens", field=field)


def _check_max_tokens(params: SamplingParams, left: int) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise _out_of_range(params.max_tokens, "give at least 1", "params.max_tokens", 1, left)
    if params.max_tokens is not None and params.max_tokens > left:
        message = f"is {params.max_tokens}; beside the prompt at most {left} tokens fit the context"
        raise errors.SequenceTooLong(message, field="params.max_tokens")
    _check_range(params.min_tokens, "params.min_tokens", 0, params.max_tokens or left)


def _check_temperature(temperature: float) -> None:
    _check_range(temperature, "params.temperature", 0.0, _MAX_TEMPERATURE)
    # Tolerate 0.01 rounded to float32 in transit.
    if 0 < temperature < _MIN_TEMPERATURE * (1 - 1e-6):
        what = f"take 0 (greedy) or at least {_MIN_TEMPERATURE}"
        raise _out_of_range(temperature, what, "params.temperature", _MIN_TEMPERATURE, _MAX_TEMPERATURE)


def _check_texts(texts: Sequence[str], field: str) -> None:
    if len(texts) > _MAX_TEXTS:
        raise errors.OutOfRange.of_length(texts, _MAX_TEXTS, f"takes at most {_MAX_TEXTS} entries", field)
    for index, text in enumerate(texts):
        if not 0 < len(text) <= _MAX_TEXT_LENGTH:
            message = f"must have 1 to {_MAX_TEXT_LENGTH} characters"
            raise errors.OutOfRange.of_length(text, _MAX_TEXT_LENGTH, message, f"{field}[{index}]")


def _check_token_ids(tokens: Sequence[int], field: str, most: int, model: ModelInfo) -> None:
    if len(tokens) > most:
        raise errors.OutOfRange.of_length(tokens, most, f"takes at most {most} entries", field)
    _check_ids(tokens, field, model)


def _check_ids(tokens: Sequence[int], field: str, model: ModelInfo) -> None:
    for index, token in enumerate(tokens):
        if not 0 <= token < model.vocab_size:
            last = model.vocab_size - 1
            message, metadata = f"is {token}; ids are {span(0, last)}", _metadata(token, 0, last)
            raise errors.TokenOutOfRange(message, field=f"{field}[{index}]", metadata=metadata)


def _check_range(value: float, field: str, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, float) and not math.isfinite(value):  # a whole number may be too large for a float
        raise errors.NonFinite("must be a finite number", field=field)
    if not low <= value <= high or (low_open and value == low):
        what = f"it must be {span(low, high, 'above ' if low_open else 'from ')}"
        raise _out_of_range(value, what, field, low, high)


def _out_of_range(value: float, what: str, field: str, low: float, high: float) -> errors.OutOfRange:
    return errors.OutOfRange(f"is {value}; {what}", field=field, metadata=_metadata(value, low, high))


def _metadata(value: float, low: float, high: float) -> dict[str, str]:
    return {"value": str(value), "minimum": str(low), "maximum": str(high)}
