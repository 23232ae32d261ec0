"""A run's files: safetensors and JSON, nothing else.

- The weights: adapter_model.safetensors and adapter_config.json in PEFT's layout, or model.safetensors with every
  parameter in the run's own dtype.
- optimizer.safetensors: the optimizer's state, such as exp_avg.<name> of each weight; grad.<name> if a gradient waits;
  rng_state.
- trainer_state.json: format version, step, counters, what is trained, the optimizer with the settings of its last step.

Format 1 does not name the optimizer, which is AdamW; it can still be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.errors import CheckpointMismatch, InvalidArgument
from paceline.types import FullParameters, LoraConfig
from trainer_service.engine.optimizers.base import AnyOptimizer, gradient_of
from trainer_service.engine.optimizers.specs import make_params, settings_of, spec_of
from trainer_service.engine.runs.async_save import AsyncSave, SaveContent, StagingMemory
from trainer_service.engine.runs.reading import check_tensors, read_json, read_tensors
from trainer_service.engine.runs.run import EngineRun
from trainer_service.engine.runs.tensor_files import TensorFile

OPTIMIZER, TRAINER_STATE = "optimizer.safetensors", "trainer_state.json"
FORMAT_VERSION = 2

_GRADIENT = "grad"
_OPTIMIZER_DTYPES = (torch.float32, torch.uint8)


class SavedOptimizer(msgspec.Struct, frozen=True):
    """An optimizer's name and the settings of its last step."""

    name: str
    settings: dict[str, Any]


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """trainer_state.json."""

    format_version: int
    step: int
    pending_tokens: int
    has_gradient: bool
    lora: LoraConfig | None = None
    full: FullParameters | None = None
    """One of the two is set."""
    optimizer: SavedOptimizer | None = None
    """None before the first step, and in format 1."""


def capture(run: EngineRun, base_model: str, memory: StagingMemory) -> AsyncSave:
    """Capture a run's whole state, to be written into an existing, empty directory."""
    trained = run.trained
    state = TrainerState(
        format_version=FORMAT_VERSION,
        step=run.step,
        pending_tokens=run.pending_tokens,
        has_gradient=run.has_gradient,
        lora=trained if isinstance(trained, LoraConfig) else None,
        full=trained if isinstance(trained, FullParameters) else None,
        optimizer=_saved_optimizer(run.optimizer),
    )
    weights, optimizer = run.exact(base_model), TensorFile(OPTIMIZER, _optimizer_tensors(run))
    return AsyncSave(SaveContent([*weights.files, optimizer], {**weights.texts, TRAINER_STATE: state}), memory)


def capture_export(run: EngineRun, base_model: str, dtype: torch.dtype, memory: StagingMemory) -> AsyncSave:
    """Capture the weights in the form that other tools read, to be written into an existing, empty directory."""
    return AsyncSave(run.export(base_model, dtype), memory)


def load(run: EngineRun, directory: Path) -> None:
    """Replace all of the run's state with that of a `capture`.

    Raises CheckpointMismatch or ChecksumMismatch before it changes anything.
    """
    weights, tensors = run.read_weights(directory, exact=True), read_tensors(directory / OPTIMIZER)
    state = read_json(directory / TRAINER_STATE, TrainerState)
    if state.format_version not in {1, FORMAT_VERSION}:
        raise CheckpointMismatch(f"trainer_state.json has format {state.format_version}; this is {FORMAT_VERSION}.")
    rng_state = tensors.pop("rng_state", torch.empty(0))
    if rng_state.dtype != torch.uint8 or rng_state.shape != run.rng_state.shape:
        raise CheckpointMismatch(
            "the random state is of another kind of device; load the weights alone, without the optimizer."
        )
    optimizer = _make_optimizer(run, state)
    _check_optimizer(run, tensors, state, optimizer)
    run.set_weights(weights)
    run.drop_gradient()
    if optimizer is not None:
        optimizer.restore(tensors)
    for name, parameter in run.parameters.items():
        if state.has_gradient:
            parameter.grad = tensors[f"{_GRADIENT}.{name}"].to(parameter.device)
    run.optimizer, run.rng_state = optimizer, rng_state
    run.released_moments = None
    run.step, run.pending_tokens, run.has_gradient = state.step, state.pending_tokens, state.has_gradient


def _saved_optimizer(optimizer: AnyOptimizer | None) -> SavedOptimizer | None:
    if optimizer is None:
        return None
    return SavedOptimizer(spec_of(optimizer.params).name, settings_of(optimizer.params))


def _make_optimizer(run: EngineRun, state: TrainerState) -> AnyOptimizer | None:
    """Create the optimizer of a checkpoint, without its history."""
    if not state.step:
        return None
    saved = state.optimizer or SavedOptimizer("adamw", {})
    try:
        params = make_params(saved.name, saved.settings)
        spec_of(params).check(params)
    except (KeyError, TypeError, InvalidArgument) as error:
        raise CheckpointMismatch(f"trainer_state.json names an optimizer that is not known: {saved.name}.") from error
    return run.make_optimizer(params)


def _check_optimizer(
    run: EngineRun, tensors: Mapping[str, Tensor], state: TrainerState, optimizer: AnyOptimizer | None
) -> None:
    expected = dict(optimizer.tensors) if optimizer is not None else {}
    if state.has_gradient:
        expected |= {f"{_GRADIENT}.{name}": _gradient_like(parameter) for name, parameter in run.parameters.items()}
    check_tensors(tensors, {name: tensor.shape for name, tensor in expected.items()}, _OPTIMIZER_DTYPES)
    for name, tensor in expected.items():
        if tensors[name].dtype != tensor.dtype:
            raise CheckpointMismatch(f"{name} is {tensors[name].dtype}; expected {tensor.dtype}.")


def _gradient_like(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=torch.float32, device="meta")


def _optimizer_tensors(run: EngineRun) -> dict[str, Tensor]:
    tensors = {"rng_state": run.rng_state}
    if run.optimizer is not None:
        tensors |= run.optimizer.tensors
    if run.has_gradient:
        tensors |= {f"{_GRADIENT}.{name}": gradient_of(parameter) for name, parameter in run.parameters.items()}
    return tensors
