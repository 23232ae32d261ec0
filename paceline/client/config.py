"""How patient a client is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that one attempt of a call may take, by kind of call; and what a client waits for beside calls."""

    training: float = 600.0
    """Commands of a run, making a run and deleting one."""
    sampling: float = 300.0
    """Samples, streams and log-probabilities."""
    query: float = 30.0
    """Everything else."""
    connect: float = 5.0
    """The first connection. Later ones are made again within RetryPolicy.budget."""
    close: float = 300.0
    """Commands without an answer, when the client is closed or the process ends. The log says what is waited for."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to send a call again that the service could not take.

    The wait before attempt n + 1 is the delay that the service asked for plus a random one, uniform between 0 and
    min(max_delay, first_delay * 2^(n - 1)) ("full jitter": clients that failed together do not come back together).
    """

    budget: float = 300.0
    """Seconds from the first failure after which a call is given up; 0 never retries."""
    first_delay: float = 0.1
    """Seconds."""
    max_delay: float = 10.0
    """Seconds."""
