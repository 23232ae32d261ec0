"""Buffers new tokens between an engine and the reader of a request, and merges them when the reader is behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from paceline.types import TopkLogprobs
from sampler_service.engine.protocol import Delivery, TokenDelta

_BEHIND_SECONDS = 0.001
"""A reader that runs later than this after its wakeup is considered delayed by other readers."""
_DELAY, _MOST_SECONDS = 8.0, 0.05
"""How long the next tokens are then delayed: a multiple of the delay, up to a maximum that nobody notices."""


class ReaderGroup:
    """The readers of one event loop, which delay each other."""

    def __init__(self) -> None:
        self.due = 0.0
        """Earliest time at which new tokens wake readers again, on the event loop's clock."""
        self._longest = 0.0
        self._until = 0.0

    def note(self, waited: float, now: float) -> None:
        """Record how many seconds a reader waited after its wakeup. The longest recent wait counts."""
        if waited >= self._longest or now > self._until:
            self._longest, self._until = waited, now + 2 * _MOST_SECONDS
        if self._longest > _BEHIND_SECONDS:
            self.due = now + min(_DELAY * self._longest, _MOST_SECONDS)


class Coalescer:
    """Holds new tokens until the reader takes them: one by one while the reader keeps up, merged when it is behind.

    A process whose readers delay each other is behind too, because there a message costs as much as several tokens.
    Then all readers delay their next tokens until one common time, a multiple of the longest delay, so that more
    tokens share a message, except for the first tokens of a request and the last tokens of a completion.
    Without `eager`, all tokens but the last of a completion are delayed. If more than `max_unread` tokens wait,
    `overflowed` is called, because the engine does not wait for the reader.
    """

    def __init__(self, readers: ReaderGroup | None = None, delivery: Delivery | None = None) -> None:
        self._readers = readers or ReaderGroup()
        self._delivery = delivery or Delivery()
        self._eager, self._sampled = self._delivery.eager, self._delivery.sampled
        self._most = math.inf if self._delivery.max_unread is None else self._delivery.max_unread
        self._unread = 0
        """Tokens that wait for the reader."""
        self._pending: dict[int, list[TokenDelta]] = {}
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._woken = 0.0
        """When the reader was last woken."""
        self._begun = False
        """Whether the reader has woken before."""
        self._timer: asyncio.TimerHandle | None = None
        self._reading = False
        """Whether the reader is awake."""
        self._closed = False
        self._error: Exception | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add tokens of a completion."""
        if self._sampled is not None:
            self._sampled(len(delta.tokens))
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = [delta]
        else:
            waiting.append(delta)
        self._unread += len(delta.tokens)
        if self._unread > self._most:
            self._most = math.inf  # report it only once
            self._delivery.overflowed()
        if delta.stop_reason is not None:
            self._delivery.completed()
            self._wake_reader()
        elif self._timer is None and not self._wake.is_set():
            self._wake_when_due()

    def close(self, error: Exception | None = None) -> None:
        """Mark the request as finished by the engine; the reader gets the tokens that still wait, then `error`.

        Later calls have no effect.
        """
        if not self._closed:
            self._closed, self._error = True, error
            self._wake_reader()
            self._delivery.ended()

    def __aiter__(self) -> Coalescer:
        return self

    async def __anext__(self) -> TokenDelta:
        """Return the next delta until closed; completions take turns."""
        if self._reading and not self._pending and not self._closed:
            self._reading = False
            self._wake.clear()
        if not self._reading:
            await self._wake.wait()
            self._reading = self._begun = True
            now = self._loop.time()
            self._readers.note(now - self._woken, now)
        if self._pending:
            delta = merged(self._pending.pop(next(iter(self._pending))))
            self._unread -= len(delta.tokens)
            return delta
        raise self._error or StopAsyncIteration

    def _wake_when_due(self) -> None:
        now, due = self._loop.time(), self._readers.due if self._begun else 0.0
        if not self._eager:
            due = now + _MOST_SECONDS
        if now >= due:
            self._wake_reader()
        else:
            self._timer = self._loop.call_at(due, self._wake_reader)

    def _wake_reader(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._wake.is_set():
            self._woken = self._loop.time()
            self._wake.set()


def merged(parts: Sequence[TokenDelta]) -> TokenDelta:
    """Merge consecutive deltas of one completion into the first one, and return it."""
    first = parts[0]
    if len(parts) == 1:
        return first
    last, rows = parts[-1], [part.topk_logprobs for part in parts if part.topk_logprobs is not None]
    for part in parts[1:]:
        first.tokens.extend(part.tokens)
        first.logprobs.extend(part.logprobs)
    first.stop_reason, first.version_spans = last.stop_reason, last.version_spans
    first.topk_logprobs = concatenated(rows) if rows else None
    return first


def concatenated(rows: Sequence[TopkLogprobs]) -> TopkLogprobs:
    """Concatenate rows of consecutive positions."""
    return TopkLogprobs(np.concatenate([row.token_ids for row in rows]), np.concatenate([row.logprobs for row in rows]))
