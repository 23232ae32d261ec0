"""A vLLM engine whose weights are written while it serves, by a trainer or from a file.

It uses vLLM's own features: vLLM pauses between two steps and keeps its requests; it drops all cached keys and values,
including those of running requests, which are then recomputed; and it records which weights computed each step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from paceline.types.training import Array
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Adapter, GenerationRequest, TokenDelta
from sampler_service.engine.vllm.engine import VllmEngine
from sampler_service.engine.vllm.params import MIXED


class InPlaceEngine(VllmEngine):
    """Implements WritableEngine."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._pauses = options.in_place == "paused"
        self._epoch = 0

    async def start(self) -> None:
        await super().start()
        await self._live().llm.update_weight_version("0")

    async def begin_write(self, version: int) -> None:
        """See WritableEngine. Without a pause, tokens are marked from before the first byte changes."""
        llm = self._live().llm
        self._epoch += 1
        if self._pauses:
            await llm.pause_generation(mode="keep", clear_cache=True)
        else:
            await llm.update_weight_version(f"{version}{MIXED}")

    async def end_write(self, version: int) -> None:
        llm = self._live().llm
        self._epoch += 1
        await llm.update_weight_version(str(version))
        if self._pauses:
            await llm.resume_generation()

    async def write_weights(self, directory: Path) -> None:
        await self._live().llm.collective_rpc("write_weights", args=(str(directory),))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        async for delta in super().generate(replace(request, tenant=self._salt(request.tenant))):
            yield delta

    async def compute_logprobs(self, tokens: list[int], adapter: Adapter | None, tenant: str) -> Array:
        return await super().compute_logprobs(tokens, adapter, self._salt(tenant))

    def _salt(self, tenant: str) -> str:
        """Return a cache salt that changes with each write, so that later requests share no earlier cached prefix."""
        return f"{tenant}/{self._epoch}"
