"""Retry calls, unchanged, that the service could not accept."""

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
from paceline.cancellation import keep_cancellation
from paceline.client.connection import RetryPolicy
from paceline.rpc.status import error_from_rpc, is_from_grpc
from paceline.trainer.v1 import trainer_service_pb2 as pb

T = TypeVar("T")

_MAX_DOUBLINGS = 30
SILENT_SECONDS = 1.0
"""How long retries are not logged: enough to reach a service that has just started."""
_NOTICE_SECONDS = 5.0
"""Time between two log lines about calls that wait for the same reason."""
_random = SystemRandom()
_log = logging.getLogger("paceline")


class RetryLog:
    """Logs which calls are retried, why, and for how long: one line every few seconds per RPC and reason."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], float] = {}

    def record_failure(self, call: str, error: errors.PacelineError, waited: float, budget: float) -> None:
        """Record that a call failed and will be retried."""
        kind = (call, error.reason)
        self._waiting[kind] += 1
        if waited < SILENT_SECONDS or monotonic() - self._logged.get(kind, -_NOTICE_SECONDS) < _NOTICE_SECONDS:
            return
        self._logged[kind] = monotonic()
        # A full service is normal and says when to retry; an unreachable one is not normal.
        level = logging.INFO if isinstance(error, errors.Exhausted) and waited < _NOTICE_SECONDS else logging.WARNING
        message = "%s: %s (%s); retrying for %.1f s, up to %.0f s; calls that wait for this reason: %d"
        _log.log(level, message, call, error.reason, error, waited, budget, self._waiting[kind])

    def record_retry(self, call: str, error: errors.PacelineError) -> None:
        """Record that a waiting call is in flight again."""
        self._waiting[call, error.reason] -= 1

    def record_answer(self, call: str, waited: float) -> None:
        """Record that a call was answered after it had failed."""
        if waited >= _NOTICE_SECONDS:
            _log.warning("%s: answered after %.1f s", call, waited)


async def with_retries(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    log: RetryLog,
    call: str,
    convert: Callable[[grpc.aio.AioRpcError], errors.PacelineError] = error_from_rpc,
) -> T:
    """Run `attempt` until it succeeds, fails permanently, or the policy's budget is spent. Raises PacelineError.

    `call` is the call's name in the log; `convert` returns the error of a failed attempt.
    """
    failures, since = 0, 0.0
    while True:
        try:
            with keep_cancellation():
                answer = await attempt()
        except grpc.aio.AioRpcError as failure:
            error, delay = convert(failure), 0.0
            # Errors from gRPC itself, such as a lost connection, request no delay; the class's default is not theirs.
            if not is_from_grpc(failure):
                delay = error.retry_after or 0.0
        else:
            if failures:
                log.record_answer(call, monotonic() - since)
            return answer
        since = since or monotonic()
        waited = monotonic() - since
        ceiling = policy.first_delay * 2 ** min(failures, _MAX_DOUBLINGS)
        delay += _random.uniform(0, min(policy.max_delay, ceiling))
        if not is_retryable(error):
            raise error
        if waited + delay > policy.budget:
            error.add_note(f"Sent {failures + 1} time(s) in {waited:.1f} s; RetryPolicy.budget is {policy.budget:g} s.")
            raise error
        log.record_failure(call, error, waited, policy.budget)
        try:
            await asyncio.sleep(delay)
        finally:
            log.record_retry(call, error)
        failures += 1


def call_name(request: object) -> str:
    """Return the name of a request's RPC, or of the command in an Execute."""
    if isinstance(request, pb.ExecuteRequest) and (command := request.WhichOneof("command")) is not None:
        return call_name(getattr(request, command))
    return type(request).__name__.removesuffix("Request")


def is_retryable(error: errors.PacelineError) -> bool:
    """Return whether the same call may succeed later: the service was unavailable or full."""
    if isinstance(error, errors.Exhausted):
        return error.retry_after is not None
    return isinstance(error, errors.Unavailable)
