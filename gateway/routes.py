"""Which service answers a call, by the package in the method's name; and which of the samplers."""

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
"""A tenant and what it named in the route metadata: a version or a checkpoint."""


class Router:
    """Chooses a service for each call.

    Samplers that can be reached come first. Among them the one with the fewest calls is taken, where a sampler that has
    not served the version yet counts as having `spill_in_flight` calls more: it would have to load it.
    """

    def __init__(self, trainer: Upstream, samplers: Sequence[Upstream], spill_in_flight: int) -> None:
        self.trainer = trainer
        self.samplers = samplers
        self._spill = spill_in_flight
        self._holders: OrderedDict[RouteKey, set[Upstream]] = OrderedDict()

    def choose(self, method: str, key: RouteKey | None) -> Upstream:
        """Return the service that a method goes to. Raises Unsupported for a package that is nobody's."""
        if method.startswith(_TRAINER):
            return self.trainer
        if not method.startswith(_SAMPLER):
            raise errors.Unsupported(f"no service behind the gateway has {method}")
        holders: set[Upstream] = self._holders.get(key, set()) if key else set()
        return min(self.samplers, key=lambda sampler: (not sampler.ready, self._load(sampler, sampler in holders)))

    @contextmanager
    def following(self, call: grpc.aio.Call, upstream: Upstream, key: RouteKey | None) -> Iterator[None]:
        """Count a call while the block lasts, which ends it, and note whether its sampler answered from its version."""
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
        """Note that a sampler holds a version: it has just answered from it."""
        self._holders.setdefault(key, set()).add(sampler)
        self._holders.move_to_end(key)
        if len(self._holders) > _MAX_KEYS:
            self._holders.popitem(last=False)

    def forget(self, key: RouteKey, sampler: Upstream) -> None:
        """Note that a sampler failed to answer from a version."""
        self._holders.get(key, set()).discard(sampler)

    def _load(self, sampler: Upstream, holds: bool) -> int:
        return sampler.in_flight + (0 if holds else self._spill)
