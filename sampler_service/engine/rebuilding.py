"""An engine whose model can be exchanged while the service lives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from paceline.errors import EngineUnavailable, ModelNotLoadable
from paceline.log import get_logger
from paceline.types import ModelInfo
from paceline.types.training import Array
from sampler_service.engine.base import Adapter, GenerationRequest, LoadTimes, SamplerEngine, TokenDelta
from sampler_service.engine.options import EngineOptions

_log = get_logger(__name__)


class RebuildingEngine:
    """Fulfils ModelEngine by an engine that is ended and built again with another model.

    Two models need not fit into memory beside each other.
    """

    def __init__(self, make: Callable[[EngineOptions], SamplerEngine], options: EngineOptions) -> None:
        """Take what makes an engine, and the options of the first."""
        self._make = make
        self._options = options
        self._engine = make(options)
        self._rebuilding = False

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def version(self) -> str:
        return self._engine.version

    @property
    def model_path(self) -> Path:
        """Directory of the model that is served."""
        return self._options.model_path

    def describe(self) -> ModelInfo:
        return self._engine.describe()

    async def start(self) -> None:
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()

    async def check_health(self) -> None:
        if not self._rebuilding:
            await self._engine.check_health()

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        return await self._engine.add_adapter(adapter)

    async def remove_adapter(self, adapter: Adapter) -> None:
        await self._engine.remove_adapter(adapter)

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        return self._engine.generate(request)

    async def compute_logprobs(self, tokens: list[int], adapter: Adapter | None, tenant: str) -> Array:
        return await self._engine.compute_logprobs(tokens, adapter, tenant)

    def num_running(self) -> int:
        return self._engine.num_running()

    async def change_model(self, model_path: Path) -> None:
        """Build the engine again from another model of the same shape.

        Raises ModelNotLoadable when it cannot be; then the model before it serves again. Raises EngineUnavailable when
        that one cannot either; then the engine is dead.
        """
        before, info = self._options, self.describe()
        self._rebuilding = True
        try:
            await self._engine.stop()
            try:
                await self._build(replace(before, model_path=model_path))
                self._check_alike(info)
            except Exception as error:
                _log.exception("model not loaded; going back", model=str(model_path))
                await self._engine.stop()
                await self._go_back(before)
                message = "the engine does not load this model; the one before it goes on serving"
                raise ModelNotLoadable(message, field="model") from error
        finally:
            self._rebuilding = False

    async def _build(self, options: EngineOptions) -> None:
        self._engine = self._make(options)
        await self._engine.start()
        self._options = options

    async def _go_back(self, options: EngineOptions) -> None:
        try:
            await self._build(options)
        except Exception as error:
            raise EngineUnavailable("neither the new model nor the one before it can be loaded") from error

    def _check_alike(self, info: ModelInfo) -> None:
        """Refuse a model for which requests were not checked: another context length, vocabulary or depth."""
        made = replace(self.describe(), dtype=info.dtype)
        if made != info:
            raise ValueError(f"the model is {made}; this sampler serves {info}")
