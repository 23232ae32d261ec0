"""vLLM engines whose weights are replaced in place: requests pause meanwhile, or run on and their tokens are marked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from paceline.errors import ChecksumMismatch, EngineUnavailable, ModelNotLoadable
from paceline.layout import MODEL_FILE
from paceline.log import get_logger
from paceline.types.training import Array
from paceline.weights import read_tensor_entries
from sampler_service.engine.model_files import parameter_shapes_of
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Adapter, Contents, GenerationRequest, TextRequest, TokenDelta
from sampler_service.engine.vllm.engine import RunningEngine, VllmEngine, translated
from sampler_service.engine.vllm.params import MIXED

_log = get_logger(__name__)
_HEAD = "lm_head.weight"
"""Output head. Files may contain it even if it is tied to the embedding."""


class ReplaceableVllmEngine(VllmEngine):
    """Implements ModelEngine: whole models overwrite each other while the engine keeps running.

    During a change no request runs: earlier ones have ended, and later ones wait.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._torn = False
        """Whether a change failed halfway, so that vLLM's weights are not those of any model."""

    @property
    def model_path(self) -> Path:
        return self._options.model_path

    async def change_model(self, model_path: Path, contents: Contents | None = None) -> None:
        """Overwrite the weights with those of a model between two steps, then empty the prefix cache."""
        if model_path != self.model_path:
            await asyncio.to_thread(_check_weights, model_path / MODEL_FILE, self.model_path)
        llm = self._live().llm
        try:
            await llm.collective_rpc("change_model", args=(str(model_path),))
            if contents is not None:
                await contents.verified()
            if not await llm.reset_prefix_cache():
                raise RuntimeError("the prefix cache is in use")
        except Exception as error:
            _log.exception("model written only in part", model=str(model_path))
            self._torn = True
            raise _torn_error() from error

    def _live(self) -> RunningEngine:
        if self._torn:
            raise _torn_error()
        return super()._live()


def _torn_error() -> EngineUnavailable:
    return EngineUnavailable("the engine's model was written only in part; it is restarting")


def _check_weights(file: Path, base: Path) -> None:
    """Refuse a file whose parameters differ from the base model's, before any write. Raises ModelNotLoadable."""
    try:
        given = {entry.name: tuple(entry.shape) for entry in read_tensor_entries(file)}
    except (ChecksumMismatch, OSError) as error:
        raise ModelNotLoadable("the file of its weights cannot be read", field="model") from error
    expected = parameter_shapes_of(base)
    given = {name: shape for name, shape in given.items() if name in expected or name != _HEAD}
    if given != expected:
        names = sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name))
        raise ModelNotLoadable(
            f"{len(names)} parameters are not as in the base model, such as {names[0]}", field="model"
        )


class WritableVllmEngine(VllmEngine):
    """Implements WritableEngine: its weights are written while it serves, by a trainer or from a file.

    It uses vLLM's own features: vLLM pauses between two steps and keeps its requests; it drops all cached keys and
    values, including those of running requests, which are then recomputed; and it records which weights computed each
    step.
    """

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
        with translated():
            if self._pauses:
                await llm.pause_generation(mode="keep", clear_cache=True)
            else:
                await llm.update_weight_version(f"{version}{MIXED}")

    async def end_write(self, version: int) -> None:
        llm = self._live().llm
        self._epoch += 1
        with translated():
            await llm.update_weight_version(str(version))
            if self._pauses:
                await llm.resume_generation()

    async def write_weights(self, directory: Path) -> None:
        with translated():
            await self._live().llm.collective_rpc("write_weights", args=(str(directory),))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        async for delta in super().generate(replace(request, tenant=self._salt(request.tenant))):
            yield delta

    async def complete_text(self, request: TextRequest) -> AsyncGenerator[bytes]:
        async with aclosing(super().complete_text(replace(request, tenant=self._salt(request.tenant)))) as parts:
            async for part in parts:
                yield part

    async def compute_logprobs(
        self, tokens: list[int], adapter: Adapter | None, tenant: str, priority: int = 0
    ) -> Array:
        return await super().compute_logprobs(tokens, adapter, self._salt(tenant), priority)

    def _salt(self, tenant: str) -> str:
        """Return a cache salt that changes with each write, so that later requests share no earlier cached prefix."""
        return f"{tenant}/{self._epoch}"
