"""What can be known of a base model without its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sampler_service.engine.adapters import LinearShapes


def linear_shapes(model: PreTrainedModel) -> LinearShapes:
    """Return (out, in) of every linear module, by name."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {name: (layer.out_features, layer.in_features) for name, layer in layers}


def linear_shapes_of(model_path: Path) -> LinearShapes:
    """Return the same for a model on disk; its skeleton is built, no weight is read."""
    return linear_shapes(_skeleton(model_path))


def parameter_shapes_of(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name, without those that are tied to another."""
    model = _skeleton(model_path)
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _skeleton(model_path: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return model
