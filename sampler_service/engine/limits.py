"""Checks that both engines run on a request first, so that an invalid request never reaches the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.errors import EmptyBatch, OutOfRange, SequenceTooLong, TokenOutOfRange, Unsupported, VersionNotFound
from paceline.types import ModelInfo, SamplingParams
from sampler_service.engine.protocol import Adapter


def check_tokens(info: ModelInfo, tokens: Sequence[int], field: str, room: int = 0) -> None:
    """Refuse token ids outside the vocabulary and sequences that leave less than `room` tokens of the context.

    Raises EmptyBatch, TokenOutOfRange, SequenceTooLong.
    """
    if not tokens:
        raise EmptyBatch("no tokens; send at least one", field=field)
    if min(tokens) < 0 or max(tokens) >= info.vocab_size:
        raise TokenOutOfRange(f"token ids go from 0 to {info.vocab_size - 1}", field=field)
    longest = info.max_context_length - room
    if len(tokens) > longest:
        raise SequenceTooLong(f"{len(tokens)} tokens; send at most {longest}", field=field)


def check_loaded(adapter: Adapter | None, loaded: Collection[int]) -> None:
    """Refuse an adapter that is not among the loaded ids. Raises VersionNotFound."""
    if adapter is not None and adapter.adapter_id not in loaded:
        raise VersionNotFound(f"{adapter.name} is not loaded", field="model")


def completion_budget(info: ModelInfo, prompt_length: int, params: SamplingParams) -> int:
    """Return how many tokens may be sampled: `max_tokens`, or the rest of the context if that is less.

    Raises OutOfRange if `max_tokens` is below 1 or `min_tokens` does not fit.
    """
    left = info.max_context_length - prompt_length
    budget = left if params.max_tokens is None else min(left, params.max_tokens)
    if budget < 1:
        raise OutOfRange(f"max_tokens is {params.max_tokens}; give at least 1", field="params.max_tokens")
    if params.min_tokens > budget:
        raise OutOfRange(f"min_tokens is {params.min_tokens}; at most {budget} fit", field="params.min_tokens")
    return budget


def refuse_constraint(params: SamplingParams) -> None:
    """Refuse structured outputs, for an engine without support for them. Raises Unsupported."""
    for name in ("json_schema", "regex"):
        if getattr(params, name):
            raise Unsupported("needs a sampler with the engine vllm", field=f"params.{name}")
