"""Converts the engine's deltas into replies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import isnan
from typing import cast

import numpy as np

from paceline import errors
from paceline.types import SampledSequence, SampleResult, ServedModel, StopReason
from sampler_service.engine.coalescer import concatenated
from sampler_service.engine.protocol import TokenDelta


async def complete(
    deltas: AsyncIterator[TokenDelta], num_samples: int, see: Callable[[TokenDelta], None]
) -> AsyncGenerator[TokenDelta]:
    """Yield the engine's deltas, and close the engine's iterator at the end in any case.

    A completion that the engine left without a stop reason ends as ABORTED. `see` is called with each delta before it
    is yielded, and raises if it must not be passed on.
    """
    unfinished = set(range(num_samples))
    async with aclosing(cast("AsyncGenerator[TokenDelta]", deltas)) as source:
        async for delta in source:
            see(delta)
            if delta.stop_reason is not None:
                unfinished.discard(delta.index)
            yield delta
    for index in sorted(unfinished):
        yield TokenDelta(index, [], [], StopReason.ABORTED)


def check_numbers(logprobs: Iterable[float], model: ServedModel) -> None:
    """Check that the tokens were not sampled from NaN. Raises NonFinite."""
    if isnan(sum(logprobs)):
        version = f"version {model.version} of {model.run_id}" if model.version else ""
        weights = model.checkpoint or version or model.base_model
        raise errors.NonFinite(
            f"{weights} gives NaN here: its weights are so large that the computation overflows; go on from a "
            "checkpoint of before that, with a lower learning rate",
            field="model",
        )


async def repeated(deltas: AsyncGenerator[TokenDelta], copies: int) -> AsyncGenerator[TokenDelta]:
    """Yield the deltas; with several copies there is only one completion, and each delta is repeated for every copy."""
    async with aclosing(deltas) as source:
        async for delta in source:
            yield delta
            for index in range(1, copies):
                yield replace(delta, index=index)


async def collect(
    deltas: AsyncIterator[TokenDelta], num_samples: int, model: ServedModel, *, prompt_logprobs: bool
) -> SampleResult:
    """Collect the completions of one prompt; `prompt_logprobs` says whether the prompt's were requested."""
    parts: list[list[TokenDelta]] = [[] for _ in range(num_samples)]
    first: TokenDelta | None = None
    cached = 0
    async for delta in deltas:
        parts[delta.index].append(delta)
        first = first or delta
        cached = max(cached, delta.prompt_cache_hit_tokens)
    return SampleResult(
        sequences=[_sequence(part) for part in parts],
        model=model,
        prompt_logprobs=first.prompt_logprobs if first and prompt_logprobs else None,
        topk_prompt_logprobs=first.topk_prompt_logprobs if first else None,
        prompt_cache_hit_tokens=cached,
    )


def _sequence(parts: Sequence[TokenDelta]) -> SampledSequence:
    rows = [part.topk_logprobs for part in parts if part.topk_logprobs is not None]
    return SampledSequence(
        tokens=np.array([token for part in parts for token in part.tokens], np.int32),
        logprobs=np.array([logprob for part in parts for logprob in part.logprobs], np.float32),
        stop_reason=parts[-1].stop_reason or StopReason.ABORTED,
        topk_logprobs=concatenated(rows) if rows else None,
        version_spans=parts[-1].version_spans,
    )
