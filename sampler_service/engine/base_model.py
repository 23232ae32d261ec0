"""Facts about a base model that can be read without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.weights import read_header
from sampler_service.engine.adapter_files import LinearShapes

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def linear_shapes(model: PreTrainedModel) -> LinearShapes:
    """Return (out, in) of every linear module, by name."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {name: (layer.out_features, layer.in_features) for name, layer in layers}


def linear_shapes_of(model_path: Path) -> LinearShapes:
    """Return the same for a model on disk. Its modules are built on the meta device; no weights are read."""
    return linear_shapes(_skeleton(model_path))


def parameter_shapes_of(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name, without parameters tied to another."""
    model = _skeleton(model_path)
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def stored_dtype(model_path: Path) -> torch.dtype | None:
    """Return the dtype that transformers uses for `auto`: the configuration's, or that of the first weight.

    None if neither specifies one.
    """
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    stored: torch.dtype | None = config.get_text_config(decoder=True).dtype or config.dtype
    if stored is not None:
        return stored
    headers = (json.loads(read_header(file)) for file in sorted(model_path.glob("*.safetensors")))
    facts = (facts for header in headers for name, facts in header.items() if name != "__metadata__")
    return next((_DTYPES[one["dtype"]] for one in facts if one["dtype"] in _DTYPES), None)


def _skeleton(model_path: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return model
