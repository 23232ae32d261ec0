"""An engine that is built again while the service lives: with another model, or because it died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import EngineUnavailable, ModelNotLoadable
from paceline.log import get_logger
from paceline.types import ModelInfo
from paceline.types.training import Array
from sampler_service.engine.base import (
    Adapter,
    GenerationRequest,
    LoadTimes,
    ModelEngine,
    SamplerEngine,
    Slots,
    TokenDelta,
)
from sampler_service.engine.options import EngineOptions

_log = get_logger(__name__)


class RebuildingEngine:
    """Fulfils ModelEngine by an engine that is ended and built again, by `change_model` or by `revive`.

    Two engines need not fit into memory beside each other.
    """

    def __init__(self, make: Callable[[EngineOptions], SamplerEngine], options: EngineOptions) -> None:
        """Take what makes an engine, and the options of the first."""
        self._make = make
        self._options = options
        self._engine = make(options)
        self._adapters: dict[int, Adapter] = {}
        self._alive = asyncio.Event()
        """Cleared when the engine is seen to be dead, set when another has all that it held."""
        self._changing = asyncio.Lock()
        self.is_changing_model = False
        """Whether the model is being exchanged, which those who wait for another one wait for."""

    @property
    def current(self) -> SamplerEngine:
        """Return the engine that does the work now."""
        return self._engine

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

    def slots(self) -> Slots:
        return self._engine.slots()

    async def start(self) -> None:
        await self._engine.start()
        self._alive.set()

    async def stop(self) -> None:
        await self._engine.stop()

    async def check_health(self) -> None:
        if self.is_changing_model:
            return
        if not self._alive.is_set():
            raise EngineUnavailable("the engine died; it is starting again")
        await self._engine.check_health()

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        """Load an adapter; where the engine is dead, or dies of it, into the one that takes its place."""
        while True:
            await self._alive.wait()
            engine = self._engine
            try:
                times = await engine.add_adapter(adapter)
            except EngineUnavailable:
                self._note_death_of(engine)
                continue
            if engine is self._engine:
                self._adapters[adapter.adapter_id] = adapter
                return times

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter; an engine that is dead has lost it already."""
        self._adapters.pop(adapter.adapter_id, None)
        if not self._alive.is_set():
            return
        engine = self._engine
        try:
            await engine.remove_adapter(adapter)
        except EngineUnavailable:
            self._note_death_of(engine)

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        return self._engine.generate(request)

    async def compute_logprobs(self, tokens: list[int], adapter: Adapter | None, tenant: str) -> Array:
        return await self._engine.compute_logprobs(tokens, adapter, tenant)

    def num_running(self) -> int:
        return self._engine.num_running()

    async def change_model(self, model_path: Path) -> None:
        """Overwrite the engine's model where it can do that, or else build the engine again from another one.

        Raises ModelNotLoadable when that cannot be; then the model before it serves again. Raises EngineUnavailable
        when that one cannot either; then the engine is dead.
        """
        self.is_changing_model = True
        try:
            async with self._changing:
                if isinstance(self._engine, ModelEngine):
                    await self._engine.change_model(model_path)
                else:
                    await self._exchange(model_path)
        finally:
            self.is_changing_model = False

    async def revive(self) -> Sequence[Adapter]:
        """End an engine that died and build another with the same adapters, from the model it was built from.

        Returns the adapters that did not load again. Raises what building raises; then the engine stays dead.
        """
        async with self._changing:
            self._alive.clear()
            await self._engine.stop()
            engine = self._make(self._options)
            try:
                await engine.start()
                lost = await self._load_again(engine)
            except BaseException:
                await engine.stop()
                raise
            # Nothing is awaited between the last look at the adapters and here.
            self._engine = engine
            self._alive.set()
        return lost

    async def _load_again(self, engine: SamplerEngine) -> Sequence[Adapter]:
        """Load all adapters, among them those that come, and without those that go, while this works."""
        loaded, lost = dict[int, Adapter](), list[Adapter]()
        while differing := self._adapters.keys() ^ loaded.keys():
            number = min(differing)
            if number in loaded:
                await engine.remove_adapter(loaded.pop(number))
                continue
            adapter = self._adapters[number]
            try:
                await engine.add_adapter(adapter)
                loaded[number] = adapter
            except EngineUnavailable:
                raise
            except Exception:
                _log.exception("adapter not loaded again", adapter=adapter.name)
                self._adapters.pop(number, None)
                lost.append(adapter)
        return lost

    def _note_death_of(self, engine: SamplerEngine) -> None:
        if engine is self._engine:
            self._alive.clear()

    async def _exchange(self, model_path: Path) -> None:
        before, info = self._options, self.describe()
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

    async def _build(self, options: EngineOptions) -> None:
        self._engine = self._make(options)
        await self._engine.start()
        self._options = options

    async def _go_back(self, options: EngineOptions) -> None:
        try:
            await self._build(options)
        except Exception as error:
            self._alive.clear()
            raise EngineUnavailable("neither the new model nor the one before it can be loaded") from error

    def _check_alike(self, info: ModelInfo) -> None:
        """Refuse a model for which requests were not checked: another context length, vocabulary or depth."""
        made = replace(self.describe(), dtype=info.dtype)
        if made != info:
            raise ValueError(f"the model is {made}; this sampler serves {info}")
