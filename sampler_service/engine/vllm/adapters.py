"""Loads adapters into vLLM's workers: during a step if the workers can poll between layers, else between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from time import perf_counter

from vllm.v1.engine.async_llm import AsyncLLM

from paceline.background import Background
from paceline.errors import InvalidShape
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Adapter, LoadTimes
from sampler_service.engine.vllm.worker.side_channel import Load, Loaded, MidStepCalls


class AdapterLoader:
    """Loads adapters into all workers of one engine."""

    def __init__(self, llm: AsyncLLM, options: EngineOptions) -> None:
        self._llm = llm
        self._direct = options.apply == "direct"
        self._num_workers = options.tensor_parallel_size * options.pipeline_parallel_size
        self._mid_step = MidStepCalls()
        self._numbers = count(1)
        self._calls = Background("adapter.load_failed")
        """Calls through vLLM's RPC that have not ended, although their adapters may already be loaded."""
        self._served: set[frozenset[str]] = set()
        """Sets of modules on which vLLM is known to serve adapters."""

    async def start(self) -> Sequence[int]:
        """Prepare the workers; return the size of each one's slots in bytes."""
        await self._mid_step.start()
        known = {"direct": self._direct, "mid_step": self._mid_step.address}
        sizes: list[int] = await self._llm.collective_rpc("prepare_adapters", kwargs=known)
        return sizes

    async def close(self) -> None:
        """Disconnect from the workers."""
        await self._mid_step.close()

    async def load(self, adapter: Adapter, modules: frozenset[str]) -> LoadTimes:
        """Make an adapter on `modules` usable from the next step on. Raises InvalidShape if vLLM cannot serve it."""
        await self._check_served(modules)
        start = perf_counter()
        loaded = await self._load(
            Load(next(self._numbers), adapter.adapter_id, adapter.name, str(adapter.path), adapter.in_memory)
        )
        seconds = max(one.seconds for one in loaded)
        waited = perf_counter() - start - seconds
        return LoadTimes(1e3 * waited, 1e3 * seconds, all(one.in_slot for one in loaded))

    async def _load(self, load: Load) -> Sequence[Loaded]:
        # Both ways are tried at once: the side channel answers during a step, vLLM's RPC between steps.
        early = asyncio.create_task(self._mid_step.load(load, self._num_workers))
        call = self._calls.start(self._call(load))
        try:
            await asyncio.wait((early, call), return_when=asyncio.FIRST_COMPLETED)
            return (early if early.done() else call).result()
        finally:
            early.cancel()

    async def _call(self, load: Load) -> Sequence[Loaded]:
        return [Loaded(*answer) for answer in await self._llm.collective_rpc("load_adapter", args=tuple(load))]

    async def _check_served(self, modules: frozenset[str]) -> None:
        """Refuse an adapter that vLLM would apply only in part. Each set of modules is checked once."""
        if modules in self._served:
            return
        left_out = await self._llm.collective_rpc("unmatched_adapter_modules", args=(sorted(modules),))
        missing = set.intersection(*map(set, left_out))
        if missing:
            raise InvalidShape(
                f"vLLM serves no adapter on {len(missing)} modules, such as {min(missing)}", field="adapter"
            )
        self._served.add(modules)
