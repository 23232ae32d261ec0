"""The stages of a generation in the engine, as spans of the request's trace."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from paceline import tracing


class GenerationStages:
    """Notes when a request had its first token and when the engine was done with it, and records both stages then."""

    def __init__(self, prompt_tokens: int) -> None:
        """Begin now, in the request's own task: the engine reports the rest from another one."""
        self._prompt_tokens = prompt_tokens
        self._parent = tracing.current()
        self._began_at = perf_counter()
        self._first_at: float | None = None
        self._tokens = 0

    @property
    def listener(self) -> Callable[[int], None] | None:
        """Called by the engine with the number of new tokens, of any completion; None if the request is not traced."""
        return self._see if self._parent else None

    def _see(self, tokens: int) -> None:
        if self._first_at is None:
            self._first_at = perf_counter()
        self._tokens += tokens

    def end(self) -> None:
        """Record the stages. A request without a token has no second one."""
        now = perf_counter()
        first_at = now if self._first_at is None else self._first_at
        tracing.record("prefill", self._began_at, first_at, self._parent, prompt_tokens=self._prompt_tokens)
        if self._tokens:
            tracing.record("decode", first_at, now, self._parent, tokens=self._tokens)
