"""Routing: the package in the method's name selects the service, and load and held versions select the sampler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from gateway.upstream import Upstream
from paceline import errors

_TRAINER = ("/paceline.trainer.v1.", "/paceline.weights.v1.")
_SAMPLER = "/paceline.sampler.v1."
_MAX_KEYS = 4096

RouteKey = tuple[str, str]
"""A tenant and the version or checkpoint that it named in the route metadata."""


class Router:
    """Chooses a service for each call.

    Reachable samplers come first, and among them the one with the fewest calls in flight. A sampler that has not served
    the version yet counts as having `spill_in_flight` more calls, because it would have to load the version.
    """

    def __init__(self, trainer: Upstream, samplers: Sequence[Upstream], spill_in_flight: int) -> None:
        self.trainer = trainer
        self.samplers = samplers
        self._spill = spill_in_flight
        self._holders: OrderedDict[RouteKey, set[Upstream]] = OrderedDict()

    def choose(self, method: str, key: RouteKey | None) -> Upstream:
        """Return the service that handles a method. Raises Unsupported for an unknown package."""
        if method.startswith(_TRAINER):
            return self.trainer
        if not method.startswith(_SAMPLER):
            raise errors.Unsupported(f"no service behind the gateway has {method}")
        holders: set[Upstream] = self._holders.get(key, set()) if key else set()
        return min(self.samplers, key=lambda sampler: (not sampler.ready, self._load(sampler, sampler in holders)))

    @contextmanager
    def following(self, call: grpc.aio.Call, upstream: Upstream, key: RouteKey | None) -> Iterator[None]:
        """Count a call while the block runs, record whether its sampler served its version, then cancel the call."""
        upstream.in_flight += 1
        try:
            yield
        except (grpc.aio.AioRpcError, errors.Unavailable) as failure:
            is_away = not isinstance(failure, grpc.aio.AioRpcError) or failure.code() is grpc.StatusCode.UNAVAILABLE
            if key and is_away:
                self.forget(key, upstream)
            raise
        else:
            if key:
                self.remember(key, upstream)
        finally:
            upstream.in_flight -= 1
            call.cancel()

    def remember(self, key: RouteKey, sampler: Upstream) -> None:
        """Record that a sampler holds a version: it has just answered from it."""
        self._holders.setdefault(key, set()).add(sampler)
        self._holders.move_to_end(key)
        if len(self._holders) > _MAX_KEYS:
            self._holders.popitem(last=False)

    def forget(self, key: RouteKey, sampler: Upstream) -> None:
        """Record that a sampler failed to answer from a version."""
        self._holders.get(key, set()).discard(sampler)

    def _load(self, sampler: Upstream, holds: bool) -> int:
        return sampler.in_flight + (0 if holds else self._spill)
