"""How many completions are admitted at a time, and when those that find no room should come again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from paceline.errors import Overloaded

_FIRST_SECONDS = 1.0
"""What a completion is taken to need before one has ended."""
_RETURNS = 1.5
"""Completions that are asked for again for each that ends: clients wait up to a half longer than they are told."""
_SOONEST, _LATEST = 0.1, 30.0
"""Bounds of the seconds that a client is told to wait."""


class Admission:
    """Counts completions from their admission to their end.

    Each client that is refused gets a later time to come again than the one before it, about as far apart as
    completions end: refusing costs as much as answering a short call, and those who all come back every second would
    take the service's time from those it has admitted.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._admitted = 0
        self._seconds = _FIRST_SECONDS
        """From a completion's admission to its end, averaged over about as many as are admitted at a time."""
        self._next_return = 0.0

    @contextmanager
    def admit(self, completions: int, running: int) -> Iterator[None]:
        """Count completions from here to their end; `running` are the engine's, which may end later.

        Raises Overloaded when there would be more than the limit.
        """
        busy = max(self._admitted, running)
        if busy + completions > self._limit:
            message = f"{busy} completions are waiting or running; at most {self._limit} may be"
            raise Overloaded(message, retry_after=self._seconds_to_wait(completions))
        self._admitted += completions
        began = self._clock()
        try:
            yield
        finally:
            self._admitted -= completions
            self._seconds += (self._clock() - began - self._seconds) * completions / self._limit

    def _seconds_to_wait(self, completions: int) -> float:
        now = self._clock()
        apart = completions * self._seconds / (_RETURNS * self._limit)
        self._next_return = max(self._next_return, now) + apart
        if self._next_return > now + _LATEST:  # Those who are told to wait for the longest must not come together.
            self._next_return = now + _LATEST
            return random.uniform(_LATEST / 2, _LATEST)  # noqa: S311 - guards no secret
        return max(self._next_return - now, _SOONEST)
