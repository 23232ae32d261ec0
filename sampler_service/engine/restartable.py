"""An engine that is restarted while the service runs: with another model, or because it died."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline import layout
from paceline.base_model.base_weights import base_weights_sha256
from paceline.errors import ChecksumMismatch, EngineUnavailable, ModelNotLoadable
from paceline.log import get_logger
from paceline.types import ModelInfo, SamplingParams
from paceline.types.training import Array
from sampler_service.engine.liveness import while_alive
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import (
    Adapter,
    Contents,
    GenerationRequest,
    LoadTimes,
    ModelEngine,
    SamplerEngine,
    Slots,
    TextRequest,
    TokenDelta,
    Turn,
)

_log = get_logger(__name__)


class RestartableEngine:
    """Implements ModelEngine with an inner engine that `change_model` or `revive` stops and builds again.

    The old engine is stopped first, because two may not fit into memory together. A rebuilt engine reads files by name,
    so they are verified to be those that the previous engine had.
    """

    def __init__(self, make: Callable[[EngineOptions], SamplerEngine], options: EngineOptions) -> None:
        """`make` creates an engine; `options` are those of the first one."""
        self._make = make
        self._options = self._base_options = options
        self._base = _BaseFiles(options.model_path)
        self._contents: Contents = self._base
        """Guard of the files of the model that the engine was built from."""
        self._engine = make(options)
        self.name, self.version = self._engine.name, self._engine.version
        self._adapters: dict[int, Adapter] = {}
        self._alive = asyncio.Event()
        """Cleared when the engine is found dead, set when its replacement has everything that it had."""
        self._changing = asyncio.Lock()
        self.is_changing_model = False
        """Whether the model is being replaced. Meanwhile health checks pass, and requests for another model wait."""

    @property
    def current(self) -> SamplerEngine:
        """Return the current inner engine."""
        return self._engine

    @property
    def model_path(self) -> Path:
        """Directory of the model that is served."""
        return self._options.model_path

    @property
    def base_sha256(self) -> str:
        """Identity of the base model's weights; empty if they have none."""
        return self._base.weights_sha256

    def describe(self) -> ModelInfo:
        return self._engine.describe()

    def slots(self) -> Slots:
        return self._engine.slots()

    async def start(self) -> None:
        """Load the base model. Raises ChecksumMismatch if its files were replaced meanwhile."""
        await self._base.note()
        await self._engine.start()
        await self._base.verified()
        self._alive.set()

    async def stop(self) -> None:
        await self._engine.stop()

    async def check_health(self) -> None:
        if self.is_changing_model:
            return
        if not self._alive.is_set():
            raise EngineUnavailable("the engine died; it is restarting")
        await self._engine.check_health()

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        """Load an adapter. If the engine is dead or dies meanwhile, wait for its replacement and load it there."""
        while True:
            await self._alive.wait()
            engine = self._engine
            try:
                times = await engine.add_adapter(adapter)
            except EngineUnavailable:
                self._note_death_of(engine)
                continue
            # Otherwise the engine was replaced meanwhile, and the new one does not have the adapter.
            if engine is self._engine:
                self._adapters[adapter.adapter_id] = adapter
                return times

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter; a dead engine has already lost it."""
        self._adapters.pop(adapter.adapter_id, None)
        if not self._alive.is_set():
            return
        engine = self._engine
        try:
            await engine.remove_adapter(adapter)
        except EngineUnavailable:
            self._note_death_of(engine)

    async def check_constraint(self, params: SamplingParams, turn: Turn) -> None:
        await self._engine.check_constraint(params, turn)

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        return self._engine.generate(request)

    async def compute_logprobs(
        self, tokens: list[int], adapter: Adapter | None, tenant: str, priority: int = 0
    ) -> Array:
        return await self._engine.compute_logprobs(tokens, adapter, tenant, priority)

    def complete_text(self, request: TextRequest) -> AsyncGenerator[bytes]:
        return self._engine.complete_text(request)

    def num_running(self) -> int:
        return self._engine.num_running()

    async def change_model(self, model_path: Path, contents: Contents | None = None) -> None:
        """Overwrite the engine's model if the engine supports that, otherwise rebuild the engine from the new model.

        Raises ModelNotLoadable if the model cannot be loaded, and ChecksumMismatch if its files were replaced; then the
        previous model serves again. Raises EngineUnavailable if that one cannot be loaded either; then the engine is
        dead.
        """
        self.is_changing_model = True
        try:
            async with self._changing:
                if contents is None:
                    contents = self._base
                    await contents.verify_again()
                if isinstance(self._engine, ModelEngine):
                    # Nobody else notices its death meanwhile: health checks of this engine pass.
                    engine = self._engine
                    await while_alive(engine.check_health, engine.change_model(model_path, contents))
                else:
                    await self._exchange(model_path, contents)
        finally:
            self.is_changing_model = False

    async def revive(self) -> Sequence[Adapter]:
        """Stop a dead engine and build another from the same model with the same adapters.

        If the model's files are no longer those that were verified, the base model is used instead. Returns the
        adapters that could not be loaded again. Raises what building the engine raises, and ChecksumMismatch if the
        base model's files changed; then the engine stays dead.
        """
        async with self._changing:
            self._alive.clear()
            await self._engine.stop()
            await self._verify_model()
            engine = self._make(self._options)
            try:
                await engine.start()
                await self._contents.verified()
                lost = await self._load_again(engine)
            except BaseException:
                await engine.stop()
                raise
            # No await since `_load_again` compared the adapters, so none was added or removed in between.
            self._engine = engine
            self._alive.set()
        return lost

    async def _verify_model(self) -> None:
        """Verify that the model's files are unchanged; if not, switch to the base model."""
        if self._contents is not self._base:
            try:
                await self._contents.verify_again()
            except (ChecksumMismatch, OSError) as error:
                _log.error("the model's files were replaced; loading the base model instead", error=str(error))
                self._options, self._contents = self._base_options, self._base
        if self._contents is self._base:
            await self._base.verify_again()

    async def _load_again(self, engine: SamplerEngine) -> Sequence[Adapter]:
        """Load all adapters into a new engine, including changes made meanwhile; return those that did not load."""
        loaded, lost = dict[int, Adapter](), list[Adapter]()
        while differing := self._adapters.keys() ^ loaded.keys():
            number = min(differing)
            if number in loaded:
                await while_alive(engine.check_health, engine.remove_adapter(loaded.pop(number)))
                continue
            adapter = self._adapters[number]
            try:
                await while_alive(engine.check_health, _load_verified(engine, adapter))
                loaded[number] = adapter
            except EngineUnavailable:
                raise
            except Exception as error:
                is_known = isinstance(error, (ChecksumMismatch, FileNotFoundError))
                _log.warning("adapter not loaded again", adapter=adapter.name, error=str(error), exc_info=not is_known)
                self._adapters.pop(number, None)
                lost.append(adapter)
        return lost

    def _note_death_of(self, engine: SamplerEngine) -> None:
        if engine is self._engine:
            self._alive.clear()

    async def _exchange(self, model_path: Path, contents: Contents) -> None:
        before, info = (self._options, self._contents), self.describe()
        await self._engine.stop()
        try:
            await self._build(replace(self._options, model_path=model_path), contents)
            self._check_alike(info)
        except Exception as error:
            _log.exception("model not loaded; restoring the one before", model=str(model_path))
            await self._engine.stop()
            self._options, self._contents = before
            await self._go_back(*before)
            await contents.verified()  # if its files were replaced, raise that instead: it is the cause
            message = "the engine does not load this model; the one before it is served again"
            raise ModelNotLoadable(message, field="model") from error

    async def _build(self, options: EngineOptions, contents: Contents) -> None:
        self._engine = self._make(options)
        await self._engine.start()
        await contents.verified()
        self._options, self._contents = options, contents

    async def _go_back(self, options: EngineOptions, contents: Contents) -> None:
        try:
            await contents.verify_again()
            await self._build(options, contents)
        except Exception as error:
            self._alive.clear()
            raise EngineUnavailable("neither the new model nor the one before it can be loaded") from error

    def _check_alike(self, info: ModelInfo) -> None:
        """Refuse a model of another context length, vocabulary or depth: requests were validated for this model's."""
        made = replace(self.describe(), dtype=info.dtype)
        if made != info:
            raise ValueError(f"the model is {made}; this sampler serves {info}")


async def _load_verified(engine: SamplerEngine, adapter: Adapter) -> None:
    """Load an adapter's files again, verifying that they have not changed. Raises ChecksumMismatch."""
    if adapter.contents is None:
        await engine.add_adapter(adapter)
        return
    await adapter.contents.verify_again()
    await engine.add_adapter(adapter)
    try:
        await adapter.contents.verified()
    except ChecksumMismatch:
        await engine.remove_adapter(adapter)
        raise


class _BaseFiles:
    """Implements Contents: the base model's files must be those that the first engine was built from."""

    def __init__(self, model_path: Path) -> None:
        """`model_path` is a directory, or the id of a model on the hub, whose snapshots never change."""
        self._path = model_path
        self._digests: tuple[str, str] | None = None
        """Identity of the weights, and SHA-256 over the JSON files beside them, which say how to compute with them."""

    @property
    def weights_sha256(self) -> str:
        """Return the identity of the weights; empty if they have none."""
        return self._digests[0] if self._digests else ""

    async def note(self) -> None:
        """Record the files before the first engine reads them. A missing model is left for the engine to report."""
        if (self._path / "config.json").is_file():
            self._digests = await asyncio.to_thread(_digests, self._path)

    async def verified(self) -> None:
        digests = await asyncio.to_thread(_digests, self._path)
        if digests != (self._digests or digests):
            raise ChecksumMismatch(
                f"the base model's files in {self._path} are not those that the sampler started with; restore those, "
                "or restart the sampler and its trainer with these",
                field="model",
            )
        self._digests = digests

    async def verify_again(self) -> None:
        await self.verified()


def _digests(path: Path) -> tuple[str, str]:
    configuration = hashlib.sha256()
    for file in layout.entries(path, "*.json"):
        configuration.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return base_weights_sha256(str(path)), configuration.hexdigest()
