"""From the engine's deltas to what a reply holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import cast

import numpy as np

from paceline.types import SampledSequence, SampleResult, ServedModel, StopReason, TopkLogprobs
from sampler_service.engine.base import TokenDelta

_BEHIND_SECONDS = 0.001
"""A reader that runs later than this after it was woken waits for others."""
_HOLD_BACK, _MOST_SECONDS = 8.0, 0.05
"""How long the next tokens are left then, in multiples of the wait and at most: no longer than people notice."""


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


class Coalescer:
    """Holds new tokens until the reader takes them: as they come while it keeps up, merged when it is behind.

    Behind is also a process whose readers wait for each other: there a message costs as much as several tokens. A
    reader that had to wait leaves the next tokens for a multiple of that time, so that more of them share a message;
    but never the last ones of a completion.
    """

    def __init__(self) -> None:
        self._pending: dict[int, TokenDelta] = {}
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._woken = 0.0
        """When the reader was last woken."""
        self._due = 0.0
        """When the next tokens may wake it."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._error: Exception | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add tokens of a completion."""
        held = self._pending.get(delta.index)
        if held is None:
            self._pending[delta.index] = delta
        else:
            held.tokens.extend(delta.tokens)
            held.logprobs.extend(delta.logprobs)
            held.stop_reason = delta.stop_reason
            held.version_spans = delta.version_spans
        if delta.stop_reason is not None or self._loop.time() >= self._due:
            self._wake_reader()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due, self._wake_reader)

    def close(self, error: Exception | None = None) -> None:
        """Say that nothing more comes; `error` is raised to the reader after what is still held."""
        self._closed, self._error = True, error
        self._wake_reader()

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """Yield deltas, the completions taking turns, until closed."""
        while True:
            await self._wake.wait()
            waited = self._loop.time() - self._woken
            while self._pending:
                yield self._pending.pop(next(iter(self._pending)))
            if self._closed:
                break
            self._wake.clear()
            if waited > _BEHIND_SECONDS:
                self._due = self._loop.time() + min(_HOLD_BACK * waited, _MOST_SECONDS)
        if self._error is not None:
            raise self._error

    def _wake_reader(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._wake.is_set():
            self._woken = self._loop.time()
            self._wake.set()


def _sequence(parts: Sequence[TokenDelta]) -> SampledSequence:
    rows = [part.topk_logprobs for part in parts if part.topk_logprobs is not None]
    return SampledSequence(
        tokens=np.array([token for part in parts for token in part.tokens], np.int32),
        logprobs=np.array([logprob for part in parts for logprob in part.logprobs], np.float32),
        stop_reason=parts[-1].stop_reason or StopReason.ABORTED,
        topk_logprobs=_concatenate(rows) if rows else None,
        version_spans=parts[-1].version_spans,
    )


def _concatenate(rows: Sequence[TopkLogprobs]) -> TopkLogprobs:
    return TopkLogprobs(np.concatenate([row.token_ids for row in rows]), np.concatenate([row.logprobs for row in rows]))
