"""A run's files: safetensors and JSON, nothing else.

- The weights: adapter_model.safetensors and adapter_config.json in PEFT's layout, or model.safetensors with every
  parameter in the run's own dtype.
- optimizer.safetensors: the optimizer's state, such as exp_avg.<name> of each weight; grad.<name> if a gradient waits;
  rng_state.
- trainer_state.json: format version, step, counters, what is trained, the optimizer with the settings of its last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import CheckpointMismatch, ChecksumMismatch, InvalidArgument
from paceline.files.regular_files import read_file
from paceline.types import FullParameters, LoraConfig
from paceline.weights import read_header
from trainer_service.engine.optimizers.base import AnyOptimizer, gradient_of
from trainer_service.engine.runs.async_save import AsyncSave, SaveContent, StagingMemory, TensorFile
from trainer_service.engine.runs.run import EngineRun
from trainer_service.engine_link.optimizer_specs import make_params, settings_of, spec_of

OPTIMIZER, TRAINER_STATE = "optimizer.safetensors", "trainer_state.json"
FORMAT_VERSION = 1

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
    """None before the first step."""


def capture(run: EngineRun, memory: StagingMemory) -> AsyncSave:
    """Capture a run's whole state, to be written into an existing, empty directory."""
    trained, saved = run.trained, None
    if run.optimizer is not None:
        params = run.optimizer.params
        saved = SavedOptimizer(spec_of(params).name, settings_of(params))
    state = TrainerState(
        format_version=FORMAT_VERSION,
        step=run.step,
        pending_tokens=run.pending_tokens,
        has_gradient=run.has_gradient,
        lora=trained if isinstance(trained, LoraConfig) else None,
        full=trained if isinstance(trained, FullParameters) else None,
        optimizer=saved,
    )
    weights, optimizer = run.exact(), TensorFile(OPTIMIZER, _optimizer_tensors(run))
    return run.capture(SaveContent([*weights.files, optimizer], {**weights.texts, TRAINER_STATE: state}), memory)


def load(run: EngineRun, directory: Path) -> None:
    """Replace all of the run's state with that of a `capture`.

    Raises CheckpointMismatch or ChecksumMismatch, or runs out of memory, before it changes anything.
    """
    weights, tensors = run.read_weights(directory, exact=True), read_tensors(directory / OPTIMIZER)
    state = _read_state(directory / TRAINER_STATE)
    rng_state = tensors.pop("rng_state", torch.empty(0))
    if rng_state.dtype != torch.uint8 or rng_state.shape != run.rng_state.shape:
        raise CheckpointMismatch(
            "the random state is of another kind of device; load the weights alone, without the optimizer."
        )
    optimizer = _make_optimizer(run, state)
    _check_optimizer(run, tensors, state, optimizer)
    if optimizer is not None:
        optimizer.restore(tensors)
    names = run.parameters if state.has_gradient else ()
    gradients = {name: tensors[f"{_GRADIENT}.{name}"].to(run.parameters[name].device) for name in names}
    run.set_weights(weights)
    run.drop_gradient()
    for name, gradient in gradients.items():
        run.parameters[name].grad = gradient
    run.optimizer, run.rng_state = optimizer, rng_state
    run.released_moments = None
    run.step, run.pending_tokens, run.has_gradient = state.step, state.pending_tokens, state.has_gradient


def _read_state(path: Path) -> TrainerState:
    if not path.is_file():
        raise CheckpointMismatch(f"the checkpoint has no {path.name}.")
    try:
        state = msgspec.json.decode(read_file(path), type=TrainerState)
    except msgspec.MsgspecError as error:
        raise CheckpointMismatch(f"{path.name} cannot be read: {error}.") from error
    if state.format_version != FORMAT_VERSION:
        raise CheckpointMismatch(f"{path.name} has format {state.format_version}; this is {FORMAT_VERSION}.")
    return state


def _make_optimizer(run: EngineRun, state: TrainerState) -> AnyOptimizer | None:
    """Create the optimizer of a checkpoint, without its history."""
    saved = state.optimizer
    if saved is None:
        return None
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
        for name, parameter in run.parameters.items():
            expected[f"{_GRADIENT}.{name}"] = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
    check_tensors(tensors, {name: tensor.shape for name, tensor in expected.items()}, _OPTIMIZER_DTYPES)
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


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check that tensors have exactly these names and shapes, and one of `dtypes`. Raises CheckpointMismatch."""
    if odd := sorted(tensors.keys() ^ shapes.keys()):
        where = "only in the checkpoint" if odd[0] in tensors else "missing from the checkpoint"
        raise CheckpointMismatch(f"{len(odd)} tensors do not match; {odd[0]} is {where}.")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise CheckpointMismatch(f"{name} is {list(tensor.shape)}, and {list(shapes[name])} in the run.")
        if tensor.dtype not in dtypes:
            raise CheckpointMismatch(f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises CheckpointMismatch if it is missing, ChecksumMismatch if it is damaged."""
    if not path.is_file():
        raise CheckpointMismatch(f"the checkpoint has no {path.name}.")
    read_header(path)  # refuses a link, and a header that would take all memory
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ChecksumMismatch(f"{path.name} is damaged: {error}.") from error
