"""vLLM's schedulers, which start waiting completions in the order of their priority, and some of them at once.

vLLM advances a limited number of completions. Without places beyond that number, one of a tenant that has nothing in
the engine would wait until one of the others ends, which may take as long as the longest completion.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from sampler_service.engine.protocol import priority_of

_LEAST_AT_ONCE = 4
_SHARE_AT_ONCE = 8


def num_at_once(usual: int) -> int:
    """Return how many completions may run beyond the usual number: an eighth as many, but at least four."""
    return max(_LEAST_AT_ONCE, usual // _SHARE_AT_ONCE)


class FairScheduler(Scheduler):
    """vLLM's scheduler with priorities as in GenerationRequest."""

    @property
    def max_num_active_reqs(self) -> int:
        """Return how many completions may run if the first of those that wait is started."""
        is_at_once = bool(self.waiting) and self.waiting.peek_request().priority < 0
        return self.max_num_running_reqs if is_at_once else self._usual

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, usual: int) -> None:
        self._usual = usual

    def add_request(self, request: Request) -> None:
        """Queue a completion. vLLM gives all samples of a request one priority, and names its sample 3 3_<request>."""
        number, is_sample, _ = request.request_id.partition("_")
        if is_sample:
            request.priority = priority_of(int(number), request.priority)
        super().add_request(request)


class FairAsyncScheduler(FairScheduler, AsyncScheduler):
    """The same for vLLM's asynchronous scheduler, which prepares a step while the previous one runs."""


def use_scheduler(config: Any, synchronous: type[Scheduler], asynchronous: type[AsyncScheduler]) -> None:
    """Make an engine of this configuration use one of these; call it before the engine is created."""
    scheduler = asynchronous if config.scheduler_config.async_scheduling else synchronous
    config.scheduler_config.scheduler_cls = f"{scheduler.__module__}.{scheduler.__name__}"
