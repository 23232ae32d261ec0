"""Timeouts and retry policy of a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds: of one attempt, by kind of call, and of connecting and closing."""

    training: float = 600.0
    """Commands of a run, and creating or deleting a run."""
    sampling: float = 300.0
    """Samples, streams and log-probabilities."""
    query: float = 30.0
    """Everything else."""
    connect: float = 5.0
    """The first connection. A lost connection is re-established within RetryPolicy.budget."""
    close: float = 300.0
    """Unanswered commands, when the client is closed or the process ends. The log names what is being waited for."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to retry a call that the service could not accept.

    The wait before attempt n + 1 is the delay requested by the service plus a random one, uniform between 0 and
    min(max_delay, first_delay * 2^(n - 1)) ("full jitter": clients that failed together do not retry together).
    """

    budget: float = 300.0
    """Seconds after the first failure until a call is given up; 0 disables retries."""
    first_delay: float = 0.1
    """In seconds."""
    max_delay: float = 10.0
    """In seconds."""
