"""Sending a call again, unchanged, when the service could not take it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from random import SystemRandom
from time import monotonic
from typing import TypeVar

import grpc

from paceline import errors
from paceline.client.config import RetryPolicy
from paceline.rpc.status import DETAILS_KEY, error_from_rpc

T = TypeVar("T")

_MOST_DOUBLINGS = 30
_UNSAID = 1.0
"""Seconds for which a call may be sent again without a word: a service that has just started is noticed within them."""
_NOTICES = 5.0
"""Seconds between two lines of the log about calls that wait for the same reason."""
_random = SystemRandom()
_log = logging.getLogger("paceline")


class RetryLog:
    """Says in the log which calls are sent again, why, and for how long: one line every few seconds for all alike."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._said: dict[tuple[str, str], float] = {}

    def waits(self, call: str, error: errors.PacelineError, waited: float, budget: float) -> None:
        """Note that a call failed and will be sent again."""
        kind = (call, error.reason)
        self._waiting[kind] += 1
        if waited < _UNSAID or monotonic() - self._said.get(kind, -_NOTICES) < _NOTICES:
            return
        self._said[kind] = monotonic()
        # A full service is everyday business and says when to come again; one that is away is not.
        level = logging.INFO if isinstance(error, errors.Exhausted) and waited < _NOTICES else logging.WARNING
        message = "%s: %s (%s); sent again since %.1f s, for up to %.0f s; calls that wait for this: %d"
        _log.log(level, message, call, error.reason, error, waited, budget, self._waiting[kind])

    def goes_on(self, call: str, error: errors.PacelineError) -> None:
        """Note that a call that waited is under way again."""
        self._waiting[call, error.reason] -= 1

    def answered(self, call: str, waited: float) -> None:
        """Note that a call that had failed was answered."""
        if waited >= _NOTICES:
            _log.warning("%s: answered after %.1f s", call, waited)


async def with_retries(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, log: RetryLog, call: str) -> T:
    """Run `attempt` until it succeeds, fails for good, or the policy's budget is spent. Raises PacelineError.

    `call` is its name in the log.
    """
    failures, since = 0, 0.0
    while True:
        try:
            answer = await attempt()
        except grpc.aio.AioRpcError as failure:
            error, delay = explain(failure)
        else:
            if failures:
                log.answered(call, monotonic() - since)
            return answer
        since = since or monotonic()
        waited = monotonic() - since
        ceiling = policy.first_delay * 2 ** min(failures, _MOST_DOUBLINGS)
        delay += _random.uniform(0, min(policy.max_delay, ceiling))
        if not is_retryable(error):
            raise error
        if waited + delay > policy.budget:
            error.add_note(f"Sent {failures + 1} time(s) in {waited:.1f} s; RetryPolicy.budget is {policy.budget:g} s.")
            raise error
        log.waits(call, error, waited, policy.budget)
        try:
            await asyncio.sleep(delay)
        finally:
            log.goes_on(call, error)
        failures += 1


def call_name(request: object) -> str:
    """Return the name of the RPC that a request is for."""
    return type(request).__name__.removesuffix("Request")


def is_retryable(error: errors.PacelineError) -> bool:
    """Whether the same call may succeed later: the service was away, full, or waited for earlier commands."""
    if isinstance(error, errors.Exhausted):
        return error.retry_after is not None
    return isinstance(error, (errors.Unavailable, errors.SeqIdGap))


def explain(failure: grpc.aio.AioRpcError) -> tuple[errors.PacelineError, float]:
    """Return the error of a failed call, and the seconds that the service asked to wait before the next attempt."""
    error = error_from_rpc(failure)
    # What gRPC itself reports, such as a lost connection, asks for no delay: the class's default is not meant.
    from_service = any(key == DETAILS_KEY for key, _ in failure.trailing_metadata() or ())
    return error, (error.retry_after or 0.0) if from_service else 0.0
