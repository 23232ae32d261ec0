"""vLLM with a model that is overwritten in place: the engine keeps running while whole models replace each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.errors import ChecksumMismatch, EngineUnavailable, ModelNotLoadable
from paceline.layout import MODEL_FILE
from paceline.log import get_logger
from paceline.weights import read_tensor_entries
from sampler_service.engine.base_model import parameter_shapes_of
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Contents
from sampler_service.engine.vllm.engine import VllmEngine

_log = get_logger(__name__)
_HEAD = "lm_head.weight"
"""Output head. Files may contain it even if it is tied to the embedding."""


class InPlaceVllmEngine(VllmEngine):
    """Implements ModelEngine. During a change no request runs: earlier ones have ended, and later ones wait."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._torn = False
        """Whether a change failed halfway, so that vLLM's weights are not those of any model."""

    @property
    def model_path(self) -> Path:
        return self._options.model_path

    async def check_health(self) -> None:
        if self._torn:
            raise EngineUnavailable("the engine's model was written in part; it is starting again")
        await super().check_health()

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
            _log.exception("model not written whole", model=str(model_path))
            self._torn = True
            raise EngineUnavailable("the engine's model was written in part; it is starting again") from error


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
