"""LoRA adapters: which modules get one, their initial weights, and their PEFT form."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import peft
import torch
from peft.functional import cast_adapter_dtype, delete_adapter, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import InvalidArgument, OutOfRange
from paceline.types import LoraConfig
from trainer_service.engine.model.base_model import decoder_layers
from trainer_service.engine.model.lora_linear import AdaptedLinear, Routing
from trainer_service.engine.model.module_groups import GROUPS, AdapterGroups, adaptable_modules
from trainer_service.engine.runs.peft_format import scaling_alpha

_PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT adds to module names of the base model."""

_NOBODY = "nobody"
"""Name of a temporary adapter with which PEFT wraps layers before any run exists."""


def adapt(model: PreTrainedModel) -> Routing:
    """Have PEFT wrap the linear layers that may get an adapter; return the routing of runs' rows through them.

    All are wrapped from the start, so that a run's sums do not depend on which layers other runs have adapters in.
    """
    routing, names = Routing(), adaptable_modules(model)
    if names:
        _inject(model, _NOBODY, LoraConfig(rank=1), names)
    for index, (_, layer) in enumerate(layers_of(model, _NOBODY)):
        layer.routing, layer.index = routing, index
    if names:
        remove_adapter(model, _NOBODY)
    return routing


def target_modules(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return the modules that get an adapter: last names if PEFT matches only these modules by them, else full names.

    Raises InvalidArgument if a chosen group cannot be adapted completely, or if no group is chosen; OutOfRange for
    layers that the model lacks.
    """
    _check_layers(lora, len(decoder_layers(model)))
    if lora.target_modules:
        return _in_layers(named_modules(adaptable_modules(model), lora.target_modules), lora)
    groups, chosen = AdapterGroups(model), list[str]()
    for group in GROUPS:
        if getattr(lora, group):
            if refusal := groups.refusal(group, lora.layers):
                raise InvalidArgument(refusal, field=f"lora.{group}")
            chosen += groups.modules(group, lora.layers)
    if not chosen:
        raise InvalidArgument("choose train_attn, train_mlp or train_unembed.", field="lora")
    return _shortest(model, chosen)


def named_modules(adaptable: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the full names among `adaptable` that `targets` match as in PEFT: the whole name or its end.

    Raises InvalidArgument for a target that matches none.
    """
    meant = {target: [name for name in adaptable if f".{name}".endswith(f".{target}")] for target in targets}
    for index, target in enumerate(targets):
        if not meant[target]:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adaptable))
            message = f"is {target!r}, which is no module that can have an adapter; there are {known}."
            raise InvalidArgument(message, field=f"lora.target_modules[{index}]")
    chosen = {name for names in meant.values() for name in names}
    return [name for name in adaptable if name in chosen]


def count_parameters(model: PreTrainedModel, lora: LoraConfig, targets: list[str]) -> int:
    """Count the weights that an adapter for these target modules will have."""
    linears: list[Any] = [
        layer.base_layer
        for name, layer in model.named_modules()
        if isinstance(layer, AdaptedLinear) and (name in targets or name.rpartition(".")[2] in targets)
    ]
    return sum(lora.rank * (linear.in_features + linear.out_features) for linear in linears)


def adapter_config(lora: LoraConfig, targets: list[str], base_model: str) -> dict[str, Any]:
    """Return adapter_config.json of a finished adapter, with the fields that every version of PEFT and vLLM knows."""
    alpha = scaling_alpha(lora)
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }


def add_adapter(model: PreTrainedModel, run_id: str, lora: LoraConfig, targets: list[str]) -> None:
    """Put a run's adapter, with float32 weights from `lora.seed`, on a model prepared by `adapt`; all or nothing."""
    try:
        _inject(model, run_id, lora, targets)
        initialise(adapter_parameters(model, run_id), lora.seed)
    except BaseException:
        remove_adapter(model, run_id)
        raise


def remove_adapter(model: PreTrainedModel, run_id: str) -> None:
    """Remove a run's adapter from the base model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        delete_adapter(model, run_id, prefix="lora_", layer_cls=LoraLayer)
    _let_all_train(model)


def layers_of(model: PreTrainedModel, run_id: str) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield each adapted module of a run, with its name in a PEFT model."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear) and run_id in module.lora_A:
            yield f"{_PEFT_PREFIX}{name}", module


def adapted_modules(model: PreTrainedModel, run_id: str) -> list[str]:
    """Return the base model's names of the modules that have a run's adapter."""
    return [name.removeprefix(_PEFT_PREFIX) for name, _ in layers_of(model, run_id)]


def adapter_parameters(model: PreTrainedModel, run_id: str) -> dict[str, nn.Parameter]:
    """Return a run's weights by their names in adapter_model.safetensors."""
    return {
        f"{name}.{factor}.weight": getattr(layer, factor)[run_id].weight
        for name, layer in layers_of(model, run_id)
        for factor in ("lora_A", "lora_B")
    }


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
    _let_all_train(model)


def _let_all_train(model: PreTrainedModel) -> None:
    """Make every adapter trainable. PEFT trains only the last one added or, once that is removed, the first other."""
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            for own in (*module.lora_A.values(), *module.lora_B.values()):
                own.requires_grad_(requires_grad=True)


def _check_layers(lora: LoraConfig, count: int) -> None:
    for layer in lora.layers:
        if not 0 <= layer < count:
            raise OutOfRange(f"the model has no layer {layer}, only 0 to {count - 1}.", field="lora.layers")


def _in_layers(names: Sequence[str], lora: LoraConfig) -> list[str]:
    return [name for name in names if not lora.layers or _layer_of(name) in {None, *lora.layers}]


def _shortest(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the last names if no other module has one of them, else the full names."""
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return last if set(meant) == set(names) else list(names)


def _layer_of(name: str) -> int | None:
    """Return the layer index in a module name; None outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
