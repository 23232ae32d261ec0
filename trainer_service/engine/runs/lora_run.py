"""Runs that train a LoRA adapter on the shared base model: which modules are adapted, initial weights, files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft.functional import cast_adapter_dtype, delete_adapter, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import InvalidArgument, OutOfRange
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from paceline.types import LoraConfig
from paceline.weights import read_adapter_config
from paceline.weights.adapter_config import adapter_config, check_adapter_config, scaling_alpha
from trainer_service.engine.model.base_model import decoder_layers
from trainer_service.engine.model.lora_linear import AdaptedLinear, Routing
from trainer_service.engine.model.module_groups import GROUPS, AdapterGroups, adaptable_modules
from trainer_service.engine.runs.async_save import SaveContent, TensorFile
from trainer_service.engine.runs.run import EngineRun, seeded_rng_state
from trainer_service.engine.runs.state_files import check_tensors, read_tensors

_PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of the base model's modules."""

_PLACEHOLDER = "placeholder"
"""Name of a temporary adapter with which PEFT wraps layers before any run exists."""


@dataclass(slots=True, kw_only=True)
class LoraRun(EngineRun):
    """A run with an adapter: float32 weights by PEFT's names."""

    trained: LoraConfig
    config: dict[str, Any]
    """adapter_config.json of the finished adapter."""
    _files: dict[torch.dtype, TensorFile] = field(default_factory=dict, init=False)
    """The file that `export` uses for each dtype; reused because the run's tensors stay the same objects."""

    def exact(self) -> SaveContent:
        return self.export(torch.float32)

    def export(self, dtype: torch.dtype) -> SaveContent:
        """Return an adapter in PEFT's layout."""
        file = self._files.setdefault(dtype, TensorFile(WEIGHTS_FILE, self.parameters, dtype, {"format": "pt"}))
        return SaveContent([file], {CONFIG_FILE: self.config})

    def read_weights(self, directory: Path, *, exact: bool) -> dict[str, Tensor]:
        """Without `exact`, accept any floating-point adapter, also PEFT's, of the same modules, rank and scaling."""
        weights = read_tensors(directory / WEIGHTS_FILE)
        check_adapter_config(self.trained, read_adapter_config(directory / CONFIG_FILE).settings)
        dtypes = (torch.float32,) if exact else (torch.float32, torch.bfloat16, torch.float16)
        check_tensors(weights, {name: parameter.shape for name, parameter in self.parameters.items()}, dtypes)
        return weights


def make_lora_run(
    model: PreTrainedModel, run_id: str, lora: LoraConfig, targets: list[str], base_model: str, device: torch.device
) -> LoraRun:
    """Put a new run's adapter, with float32 weights from `lora.seed`, on an `adapt`ed model; all or nothing."""
    try:
        _inject(model, run_id, lora, targets)
        parameters = {
            f"{_PEFT_PREFIX}{name}.{factor}.weight": getattr(layer, factor)[run_id].weight
            for name, layer in _layers_of(model, run_id)
            for factor in ("lora_A", "lora_B")
        }
        initialise(parameters, lora.seed)
    except BaseException:
        remove_adapter(model, run_id)
        raise
    return LoraRun(
        run_id=run_id,
        trained=lora,
        config=adapter_config(lora, targets, base_model),
        parameters=parameters,
        rng_state=seeded_rng_state(lora.seed, device),
        uses_dropout=lora.dropout > 0,
    )


def adapt(model: PreTrainedModel) -> Routing:
    """Have PEFT wrap the linear layers that may get an adapter; return the routing of runs' rows through them.

    All are wrapped from the start, so that a run's sums do not depend on which layers other runs have adapters in.
    """
    routing, names = Routing(), adaptable_modules(model)
    if names:
        _inject(model, _PLACEHOLDER, LoraConfig(rank=1), names)
    for index, (_, layer) in enumerate(_layers_of(model, _PLACEHOLDER)):
        layer.routing, layer.index = routing, index
    if names:
        remove_adapter(model, _PLACEHOLDER)
    return routing


def target_modules(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return the modules that get an adapter: last names if PEFT matches only these modules by them, else full names.

    Raises InvalidArgument if a chosen group cannot be adapted completely, or if no group is chosen; OutOfRange for
    layers that the model lacks.
    """
    count = len(decoder_layers(model))
    for layer in lora.layers:
        if not 0 <= layer < count:
            raise OutOfRange(f"the model has no layer {layer}, only 0 to {count - 1}.", field="lora.layers")
    if lora.target_modules:
        names = _named(adaptable_modules(model), lora.target_modules)
        return [name for name in names if not lora.layers or _layer_of(name) in {None, *lora.layers}]
    groups, chosen = AdapterGroups(model), list[str]()
    for group in GROUPS:
        if getattr(lora, group):
            if refusal := groups.refusal(group, lora.layers):
                raise InvalidArgument(refusal, field=f"lora.{group}")
            chosen += groups.modules(group, lora.layers)
    if not chosen:
        raise InvalidArgument("choose train_attn, train_mlp or train_unembed.", field="lora")
    return _shortest(model, chosen)


def count_parameters(model: PreTrainedModel, lora: LoraConfig, targets: list[str]) -> int:
    """Count the weights that an adapter for these target modules will have."""
    linears: list[Any] = [
        layer.base_layer
        for name, layer in model.named_modules()
        if isinstance(layer, AdaptedLinear) and (name in targets or name.rpartition(".")[2] in targets)
    ]
    return sum(lora.rank * (linear.in_features + linear.out_features) for linear in linears)


def remove_adapter(model: PreTrainedModel, run_id: str) -> None:
    """Remove a run's adapter from the base model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        delete_adapter(model, run_id, prefix="lora_", layer_cls=LoraLayer)
    _make_all_trainable(model)


def _layers_of(model: PreTrainedModel, run_id: str) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield each adapted module of a run, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear) and run_id in module.lora_A:
            yield name, module


def adapted_modules(model: PreTrainedModel, run_id: str) -> list[str]:
    """Return the base model's names of the modules that have a run's adapter."""
    return [name for name, _ in _layers_of(model, run_id)]


@torch.no_grad()
def initialise(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """Set LoRA's initial weights: A uniform in +-1/sqrt(fan_in), B zero.

    They are drawn on the CPU in float32 from `seed` alone, so they are the same on every device, whatever ran before.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters.items():
        start: Tensor = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        parameter.copy_(start)


def _inject(model: PreTrainedModel, name: str, lora: LoraConfig, targets: list[str]) -> None:
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=scaling_alpha(lora),  # type: ignore[arg-type]  # annotated int, but only divided
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: AdaptedLinear})  # noqa: SLF001 - PEFT's way to use a custom layer
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # An adapter on the head affects only the head: embeddings tied to it stay as they are.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
            inject_adapter_in_model(config, model, name)
        cast_adapter_dtype(model, name)
    finally:
        # PEFT would warn about a second adapter if the first one's settings were here; the layers hold all it needs.
        vars(model).pop("peft_config", None)
    _make_all_trainable(model)


def _make_all_trainable(model: PreTrainedModel) -> None:
    """Make every adapter trainable. PEFT trains only the last one added or, once that is removed, the first other."""
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            for own in (*module.lora_A.values(), *module.lora_B.values()):
                own.requires_grad_(requires_grad=True)


def _named(adaptable: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the full names among `adaptable` that `targets` match as in PEFT: the whole name or its end.

    Raises InvalidArgument for a target that matches none.
    """
    matches = {target: [name for name in adaptable if f".{name}".endswith(f".{target}")] for target in targets}
    for index, target in enumerate(targets):
        if not matches[target]:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adaptable))
            message = f"is {target!r}, which is not a module that can have an adapter; those are {known}."
            raise InvalidArgument(message, field=f"lora.target_modules[{index}]")
    chosen = {name for names in matches.values() for name in names}
    return [name for name in adaptable if name in chosen]


def _shortest(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the last names if no other module has one of them, else the full names."""
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    same = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return last if set(same) == set(names) else list(names)


def _layer_of(name: str) -> int | None:
    """Return the layer index in a module name; None outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
