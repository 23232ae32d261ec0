"""A run on disk: safetensors and JSON, nothing else.

- adapter_model.safetensors, adapter_config.json: the weights in PEFT's layout.
- optimizer.safetensors: the optimizer's state, such as exp_avg.<name> of each weight; grad.<name> if a gradient waits;
  rng_state.
- trainer_state.json: format version, step, counters, the LoRA config, the optimizer with the settings of its last step.

Format 1 knew AdamW alone and did not name it; it is still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import CheckpointMismatch, ChecksumMismatch, InvalidArgument
from trainer_service.engine.adapters import adapter_config
from trainer_service.engine.captures import Capture, StagingMemory
from trainer_service.engine.optimizers.base import AnyOptimizer, gradient_of
from trainer_service.engine.optimizers.make import make_optimizer
from trainer_service.engine.optimizers.specs import make_params, settings_of, spec_of
from trainer_service.engine.peft_format import check_adapter_config
from trainer_service.engine.run import EngineRun
from trainer_service.engine.tensor_files import TensorFile

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER, TRAINER_STATE = "optimizer.safetensors", "trainer_state.json"
FORMAT_VERSION = 2

_GRADIENT = "grad"
_OPTIMIZER_DTYPES = (torch.float32, torch.uint8)

T = TypeVar("T")


class SavedOptimizer(msgspec.Struct, frozen=True):
    """An optimizer by name, with the settings of its last step."""

    name: str
    settings: dict[str, Any]


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """trainer_state.json."""

    format_version: int
    step: int
    pending_tokens: int
    has_gradient: bool
    lora: dict[str, Any]
    optimizer: SavedOptimizer | None = None
    """None before the first step, and in format 1."""


def capture(run: EngineRun, base_model: str, memory: StagingMemory) -> Capture:
    """Take everything that a run is, to be written into an empty directory."""
    state = TrainerState(
        format_version=FORMAT_VERSION,
        step=run.step,
        pending_tokens=run.pending_tokens,
        has_gradient=run.has_gradient,
        lora=asdict(run.lora),
        optimizer=_saved_optimizer(run.optimizer),
    )
    files = (_adapter_file(run, torch.float32), TensorFile(OPTIMIZER, _optimizer_tensors(run)))
    return run.hold(Capture(files, {ADAPTER_CONFIG: _adapter_config(run, base_model), TRAINER_STATE: state}, memory))


def capture_adapter(run: EngineRun, base_model: str, dtype: torch.dtype, memory: StagingMemory) -> Capture:
    """Take the weights, to be written in PEFT's layout. The same weights give the same bytes."""
    return run.hold(Capture((_adapter_file(run, dtype),), {ADAPTER_CONFIG: _adapter_config(run, base_model)}, memory))


def load_adapter(run: EngineRun, directory: Path) -> None:
    """Replace the run's weights by any floating-point adapter, PEFT's too, of the same modules, rank and scaling.

    Raises CheckpointMismatch or ChecksumMismatch before anything is changed.
    """
    weights = _read_tensors(directory / ADAPTER_WEIGHTS)
    check_adapter_config(run.lora, _read_json(directory / ADAPTER_CONFIG, dict[str, Any]))
    _check_tensors(weights, _shapes(run), (torch.float32, torch.bfloat16, torch.float16))
    _copy_weights(run, weights)


def load(run: EngineRun, directory: Path) -> None:
    """Replace all of the run's state by that of a capture.

    Raises CheckpointMismatch or ChecksumMismatch before anything is changed.
    """
    weights, tensors = _read_tensors(directory / ADAPTER_WEIGHTS), _read_tensors(directory / OPTIMIZER)
    state = _read_json(directory / TRAINER_STATE, TrainerState)
    if state.format_version not in {1, FORMAT_VERSION}:
        raise CheckpointMismatch(f"trainer_state.json has format {state.format_version}; this is {FORMAT_VERSION}.")
    check_adapter_config(run.lora, _read_json(directory / ADAPTER_CONFIG, dict[str, Any]))
    _check_tensors(weights, _shapes(run), (torch.float32,))
    rng_state = tensors.pop("rng_state", torch.empty(0))
    if rng_state.dtype != torch.uint8 or rng_state.shape != run.rng_state.shape:
        raise CheckpointMismatch(
            "the random state is of another kind of device; load the weights alone, without the optimizer."
        )
    optimizer = _make_optimizer(run, state)
    _check_optimizer(run, tensors, state, optimizer)
    _copy_weights(run, weights)
    run.drop_gradient()
    if optimizer is not None:
        optimizer.restore(tensors)
    for name, parameter in run.parameters.items():
        if state.has_gradient:
            parameter.grad = tensors[f"{_GRADIENT}.{name}"].to(parameter.device)
    run.optimizer, run.rng_state = optimizer, rng_state
    run.step, run.pending_tokens, run.has_gradient = state.step, state.pending_tokens, state.has_gradient


def _saved_optimizer(optimizer: AnyOptimizer | None) -> SavedOptimizer | None:
    if optimizer is None:
        return None
    return SavedOptimizer(spec_of(optimizer.params).name, settings_of(optimizer.params))


def _make_optimizer(run: EngineRun, state: TrainerState) -> AnyOptimizer | None:
    """Make the optimizer of a checkpoint, without its history."""
    if not state.step:
        return None
    saved = state.optimizer or SavedOptimizer("adamw", {})
    try:
        params = make_params(saved.name, saved.settings)
        spec_of(params).check(params)
    except (KeyError, TypeError, InvalidArgument) as error:
        raise CheckpointMismatch(f"trainer_state.json names an optimizer that is not known: {saved.name}.") from error
    return make_optimizer(run.parameters, params)


def _check_optimizer(
    run: EngineRun, tensors: Mapping[str, Tensor], state: TrainerState, optimizer: AnyOptimizer | None
) -> None:
    expected = dict(optimizer.tensors) if optimizer is not None else {}
    if state.has_gradient:
        expected |= {f"{_GRADIENT}.{name}": parameter for name, parameter in run.parameters.items()}
    _check_tensors(tensors, {name: tensor.shape for name, tensor in expected.items()}, _OPTIMIZER_DTYPES)
    for name, tensor in expected.items():
        if tensors[name].dtype != tensor.dtype:
            raise CheckpointMismatch(f"{name} is {tensors[name].dtype}; expected {tensor.dtype}.")


def _optimizer_tensors(run: EngineRun) -> dict[str, Tensor]:
    tensors = {"rng_state": run.rng_state}
    if run.optimizer is not None:
        tensors |= run.optimizer.tensors
    if run.has_gradient:
        tensors |= {f"{_GRADIENT}.{name}": gradient_of(parameter) for name, parameter in run.parameters.items()}
    return tensors


def _adapter_file(run: EngineRun, dtype: torch.dtype) -> TensorFile:
    return TensorFile(ADAPTER_WEIGHTS, run.parameters, dtype, {"format": "pt"})


def _adapter_config(run: EngineRun, base_model: str) -> dict[str, Any]:
    return adapter_config(run.lora, run.targets, base_model)


def _shapes(run: EngineRun) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in run.parameters.items()}


@torch.no_grad()
def _copy_weights(run: EngineRun, weights: Mapping[str, Tensor]) -> None:
    run.before_change()
    for name, parameter in run.parameters.items():
        parameter.copy_(weights[name])


def _check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], dtypes: tuple[torch.dtype, ...]
) -> None:
    if odd := sorted(tensors.keys() ^ shapes.keys()):
        where = "only in the checkpoint" if odd[0] in tensors else "missing from the checkpoint"
        raise CheckpointMismatch(f"{len(odd)} tensors do not match; {odd[0]} is {where}.")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise CheckpointMismatch(f"{name} is {list(tensor.shape)}, and {list(shapes[name])} in the run.")
        if tensor.dtype not in dtypes:
            raise CheckpointMismatch(f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}.")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointMismatch(f"the checkpoint has no {path.name}.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ChecksumMismatch(f"{path.name} is damaged: {error}.") from error


def _read_json(path: Path, kind: type[T]) -> T:
    if not path.is_file():
        raise CheckpointMismatch(f"the checkpoint has no {path.name}.")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise CheckpointMismatch(f"{path.name} cannot be read: {error}.") from error
