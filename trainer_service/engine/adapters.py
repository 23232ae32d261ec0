"""LoRA adapters: which modules get one, how it starts, and its PEFT form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import peft
import torch
from peft.functional import cast_adapter_dtype, delete_adapter, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import InvalidArgument, OutOfRange
from paceline.types import LoraConfig
from trainer_service.engine.fused.lora_linear import FusedLoraLinear
from trainer_service.engine.peft_format import scaling_alpha

_GROUPS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}
"""Flag of LoraConfig -> last names of the modules that it stands for in Llama and Qwen models."""


def target_modules(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Name the modules that get an adapter: last names for all layers, full names for a choice of layers.

    Raises InvalidArgument when the model has no module of a chosen group or no group is chosen, OutOfRange for layers
    that it lacks.
    """
    _check_layers(lora, model.config.num_hidden_layers)
    linears = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, LoraLayer))]
    chosen: list[str] = []
    for flag, last_names in _GROUPS.items():
        if not getattr(lora, flag):
            continue
        found = [name for name in linears if name.rpartition(".")[2] in last_names]
        if not found:
            raise InvalidArgument(f"the model has no module named {' or '.join(last_names)}.", field=f"lora.{flag}")
        chosen += found
    if not chosen:
        raise InvalidArgument("choose train_attn, train_mlp or train_unembed.", field="lora")
    if lora.layers:
        return [name for name in chosen if _layer_of(name) in {None, *lora.layers}]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in chosen))


def count_parameters(model: PreTrainedModel, lora: LoraConfig, targets: list[str]) -> int:
    """Count the weights that an adapter for these target modules will have."""
    chosen = (module for name, module in model.named_modules() if name in targets or name.rpartition(".")[2] in targets)
    linears: list[Any] = [getattr(module, "base_layer", module) for module in chosen]
    return sum(lora.rank * (linear.in_features + linear.out_features) for linear in linears)


def peft_config(lora: LoraConfig, targets: list[str]) -> peft.LoraConfig:
    """Put the settings of a run's adapter in PEFT's terms."""
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=scaling_alpha(lora),  # type: ignore[arg-type]  # annotated int, but only divided
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: FusedLoraLinear})  # noqa: SLF001 - PEFT's way to name one's own layer
    return config


def adapter_config(lora: LoraConfig, targets: list[str], base_model: str) -> dict[str, Any]:
    """Describe a finished adapter in adapter_config.json, with the fields that every version of PEFT and vLLM knows."""
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
    """Put a run's adapter, with float32 weights from `lora.seed`, on the base model; wholly or not at all."""
    try:
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(peft_config(lora, targets), model, run_id)
        cast_adapter_dtype(model, run_id)
        initialise(adapter_parameters(model, run_id), lora.seed)
    except BaseException:
        remove_adapter(model, run_id)
        raise
    finally:
        # PEFT would warn of a second adapter if it found the first one's settings here; the layers hold all it needs.
        vars(model).pop("peft_config", None)
    for _, layer in layers_of(model, run_id):
        layer.lora_dropout[run_id].eval()


def remove_adapter(model: PreTrainedModel, run_id: str) -> None:
    """Take a run's adapter off the base model."""
    delete_adapter(model, run_id, prefix="lora_", layer_cls=LoraLayer)


def layers_of(model: PreTrainedModel, run_id: str) -> Iterator[tuple[str, LoraLayer]]:
    """Each adapted module of a run, by the name that it has in a PEFT model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and run_id in module.lora_A:
            yield f"base_model.model.{name}", module


def adapter_parameters(model: PreTrainedModel, run_id: str) -> dict[str, nn.Parameter]:
    """Collect a run's weights by the names that they have in adapter_model.safetensors."""
    return {
        f"{name}.{part}.weight": getattr(layer, part)[run_id].weight
        for name, layer in layers_of(model, run_id)
        for part in ("lora_A", "lora_B")
    }


@torch.no_grad()
def initialise(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """LoRA's initial weights: A uniform in +-1/sqrt(fan_in), B zero.

    Drawn on the CPU in float32 from `seed` alone, so they are the same on every device and whatever was run before.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters.items():
        start: Tensor = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        parameter.copy_(start)


def _check_layers(lora: LoraConfig, count: int) -> None:
    for layer in lora.layers:
        if not 0 <= layer < count:
            raise OutOfRange(f"the model has no layer {layer}, only 0 to {count - 1}.", field="lora.layers")


def _layer_of(name: str) -> int | None:
    """Read the layer's index from a module name; None outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
