"""Runs that train every parameter, in a model of their own, with a random generator of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from paceline.errors import CheckpointMismatch
from paceline.layout import MODEL_FILE
from paceline.types import FullParameters, OptimizerParams, WeightStorage
from trainer_service.engine.model.base_model import PassMode, load_base_model, use_attention
from trainer_service.engine.optimizers.base import AnyOptimizer
from trainer_service.engine.optimizers.rounded import RoundedOptimizer
from trainer_service.engine.runs.async_save import SaveContent, TensorFile
from trainer_service.engine.runs.run import TRAINED_BYTES, EngineRun, seeded_rng_state
from trainer_service.engine.runs.state_files import check_tensors, read_tensors
from trainer_service.engine_link.options import EngineOptions
from trainer_service.text import read_tokenizer_files

_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_METADATA = {"format": "pt"}


@dataclass(kw_only=True)
class FullRun(EngineRun):
    """A run with its own model. Tied weights are one parameter, under the first one's name."""

    trained: FullParameters
    model: PreTrainedModel
    model_path: str
    """Where the model was loaded from."""
    masters: dict[str, nn.Parameter]
    """float32 weights of which the parameters of these names are rounded copies; the other parameters are weights."""

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        return self.parameters | self.masters

    @property
    def owned(self) -> list[nn.Parameter]:
        return [*self.parameters.values(), *self.masters.values()]

    def exact(self) -> SaveContent:
        return SaveContent([TensorFile(MODEL_FILE, self.weights, metadata=_METADATA)], {})

    def export(self, dtype: torch.dtype) -> SaveContent:
        """Return a directory that transformers and vLLM can load: weights in one file, configuration, tokenizer.

        Each weight is written in the dtype that the run computes with, whatever `dtype`.
        """
        del dtype
        file = TensorFile(MODEL_FILE, self._exported(), metadata=_METADATA)
        # The tokenizer's files include the configuration of the loaded model, which is replaced.
        return SaveContent([file], {**read_tokenizer_files(self.model_path), **self._configuration()})

    def read_weights(self, directory: Path, *, exact: bool) -> dict[str, Tensor]:
        """Without `exact`, accept any floating-point model of the same names and shapes, also a sampler checkpoint."""
        weights = read_tensors(directory / MODEL_FILE)
        check_tensors(
            weights,
            {name: weight.shape for name, weight in self.weights.items()},
            (torch.float32, torch.bfloat16, torch.float16),
        )
        for name, weight in self.weights.items() if exact else ():  # a few may be float32 among bfloat16
            if weights[name].dtype is not weight.dtype:
                raise CheckpointMismatch(f"{name} is {weights[name].dtype}; expected {weight.dtype}.")
        return weights

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        super().set_weights(weights)
        self._round_masters()

    def make_optimizer(self, params: OptimizerParams) -> AnyOptimizer:
        if self.trained.storage is WeightStorage.BFLOAT16:
            return RoundedOptimizer(self.parameters, params, torch.Generator(self.model.device))
        return super().make_optimizer(params)

    def take_step(self, optimizer: AnyOptimizer, params: OptimizerParams, norm: float) -> float:
        if isinstance(optimizer, RoundedOptimizer):
            return self._take_rounded_step(optimizer, params, norm)
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad
        try:
            learning_rate = super().take_step(optimizer, params, norm)
        finally:
            for master in self.masters.values():
                master.grad = None
        self._round_masters()
        return learning_rate

    def _take_rounded_step(self, optimizer: RoundedOptimizer, params: OptimizerParams, norm: float) -> float:
        optimizer.generator.set_state(self.rng_state)
        learning_rate = super().take_step(optimizer, params, norm)
        self.rng_state = optimizer.generator.get_state()
        return learning_rate

    @torch.no_grad()
    def _round_masters(self) -> None:
        for name, master in self.masters.items():
            self.parameters[name].copy_(master)

    def _exported(self) -> dict[str, Tensor]:
        """Return the model's state under the names that files of this architecture use; tied weights occur once."""
        weights = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {name: value for name, value in self.model.state_dict().items() if name not in weights}
        state: dict[str, Tensor] = revert_weight_conversion(self.model, {**buffers, **self.parameters})
        return state

    def _configuration(self) -> dict[str, Any]:
        config = json.loads(self.model.config.to_json_string())
        in_half = any(parameter.dtype is torch.bfloat16 for parameter in self.parameters.values())
        named = {"architectures": [type(self.model).__name__], "dtype": "bfloat16" if in_half else "float32"}
        texts = {_CONFIG: config | named}
        if self.model.can_generate():
            texts[_GENERATION_CONFIG] = json.loads(self.model.generation_config.to_json_string())
        return texts


def full_run_bytes(full: FullParameters, options: EngineOptions, count: int) -> int:
    """Return the bytes that a run of `count` parameters may come to hold: 14, 16 or 18 per parameter."""
    weights = 2 if full.storage is WeightStorage.BFLOAT16 else 4 if options.dtype == "float32" else 6
    return (weights + TRAINED_BYTES) * count


def make_full_run(
    run_id: str, full: FullParameters, options: EngineOptions, mode: PassMode, base: PreTrainedModel
) -> FullRun:
    """Load a copy of the base model and make all of it trainable, by passes of a mode.

    A run whose weights are bfloat16 also computes in bfloat16. If they are float32 and the engine computes in bfloat16,
    the run computes with a rounded copy of those that are bfloat16 in `base`, the engine's model. Weights that the
    architecture keeps in float32 are float32 in every run. Raises ModelNotFound.
    """
    in_float32 = full.storage is WeightStorage.FLOAT32
    own = replace(options, dtype="float32" if in_float32 else "bfloat16", base_dir="")
    model = load_base_model(own, fused=mode.fused)
    use_attention(model, mode.attention)
    parameters = dict(model.named_parameters())
    masters = _round_as(base, model) if in_float32 else {}
    for parameter in parameters.values():
        parameter.requires_grad_()
        # Gradients of several passes are summed in float32, whatever dtype the passes compute in.
        parameter.grad_dtype = torch.float32
    return FullRun(
        run_id=run_id,
        parameters=parameters,
        rng_state=seeded_rng_state(full.seed, torch.device(options.device)),
        trained=full,
        model=model,
        model_path=options.model_path,
        masters=masters,
    )


def _round_as(base: PreTrainedModel, model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Give a float32 model the dtypes of `base`, which may have adapters; return the weights that were rounded."""
    tensors = (*base.named_parameters(), *base.named_buffers(remove_duplicate=False))
    dtypes = {name.replace(".base_layer.", "."): tensor.dtype for name, tensor in tensors}
    masters = {
        name: nn.Parameter(parameter.detach())
        for name, parameter in model.named_parameters()
        if dtypes[name] is not parameter.dtype
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(dtypes[name])
    return masters
