"""From the engine's deltas to what a reply holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import numpy as np

from paceline.types import SampledSequence, SampleResult, ServedModel, StopReason
from sampler_service.engine.base import TokenDelta
from sampler_service.engine.coalescer import concatenated


async def complete(
    deltas: AsyncIterator[TokenDelta], num_samples: int, count: Callable[[int], None]
) -> AsyncGenerator[TokenDelta]:
    """Pass the engine's deltas on and close the engine's iterator in the end, whatever happens.

    A completion that the engine left without a stop reason ends as ABORTED. `count` hears how many tokens came.
    """
    unfinished = set(range(num_samples))
    async with aclosing(cast("AsyncGenerator[TokenDelta]", deltas)) as source:
        async for delta in source:
            count(len(delta.tokens))
            if delta.stop_reason is not None:
                unfinished.discard(delta.index)
            yield delta
    for index in sorted(unfinished):
        yield TokenDelta(index, [], [], StopReason.ABORTED)


async def repeated(deltas: AsyncGenerator[TokenDelta], copies: int) -> AsyncGenerator[TokenDelta]:
    """Yield the deltas; where there are several copies, those of the one completion once for each of them."""
    async with aclosing(deltas) as source:
        async for delta in source:
            yield delta
            for index in range(1, copies):
                yield replace(delta, index=index)


async def collect(
    deltas: AsyncIterator[TokenDelta], num_samples: int, model: ServedModel, *, prompt_logprobs: bool
) -> SampleResult:
    """Gather the completions of one prompt; `prompt_logprobs` says whether the prompt's were asked for."""
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
