"""Sending a call again, unchanged, when the service could not take it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import SystemRandom
from typing import TypeVar

import grpc

from paceline import errors
from paceline.client.config import RetryPolicy
from paceline.rpc.status import DETAILS_KEY, error_from_rpc

T = TypeVar("T")

_MOST_DOUBLINGS = 30
_random = SystemRandom()


async def with_retries(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """Run `attempt` until it succeeds, fails for good, or the policy's budget is spent. Raises PacelineError."""
    clock = asyncio.get_running_loop().time
    failures, deadline = 0, 0.0
    while True:
        try:
            return await attempt()
        except grpc.aio.AioRpcError as failure:
            error, delay = explain(failure)
        deadline = deadline or clock() + policy.budget
        ceiling = policy.first_delay * 2 ** min(failures, _MOST_DOUBLINGS)
        delay += _random.uniform(0, min(policy.max_delay, ceiling))
        if not is_retryable(error) or clock() + delay > deadline:
            raise error
        await asyncio.sleep(delay)
        failures += 1


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
