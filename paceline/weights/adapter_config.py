"""An adapter's adapter_config.json: written for a run, and checked before another's weights are read into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointMismatch
from paceline.types import LoraConfig

BASE_LAYER = ".base_layer."
"""In the name of a tensor: it is the base model's own weight, which PEFT saves beside an adapter on the output head."""

_WITHOUT_EFFECT = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    ]
)
"""Fields whose effect, if any, shows in the names and shapes of the tensors."""

_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights and the adapter's form as they are."""

_PATTERNS = {"alpha_pattern": "lora_alpha", "rank_pattern": "r"}
"""Fields with a value for each of some modules -> the field with the value for all others."""

_DEFAULTS = {"use_rslora": False, "init_lora_weights": True}
"""PEFT's values for missing fields."""


def scaling_alpha(lora: LoraConfig) -> float:
    """Return LoRA's alpha: 2 r unless set."""
    return float(2 * lora.rank if lora.alpha is None else lora.alpha)


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


def check_adapter_config(lora: LoraConfig, config: Mapping[str, Any]) -> None:
    """Check that weights with this adapter_config.json compute in a run of `lora` what they compute in PEFT.

    Raises CheckpointMismatch for another rank or scaling, and for every setting of a LoRA variant (DoRA, separate
    alphas for some modules, a changed base model and so on), including settings that are unknown here.
    """
    theirs = _DEFAULTS | dict(config)
    if (kind := theirs.get("peft_type")) != "LORA":
        said = "names no peft_type" if kind is None else f"has peft_type {kind}"
        raise CheckpointMismatch(
            f"adapter_config.json {said}; only LORA is loaded: save the adapter as LoRA with PEFT."
        )
    ours = {"r": lora.rank, "lora_alpha": scaling_alpha(lora), "use_rslora": lora.use_rslora}
    for field, mine in ours.items():
        if theirs.get(field) != mine:
            name = "rank" if field == "r" else field
            raise CheckpointMismatch(
                f"the {name} is {theirs.get(field)} in the checkpoint and {mine} in the run; load it into a run that "
                f"has its {name}, such as one made from it (create_training_client_from_state)"
            )
    if (start := theirs["init_lora_weights"]) not in _PLAIN_STARTS:
        raise CheckpointMismatch(
            f"init_lora_weights is {start}, which changes more than the adapter; convert it to a plain LoRA with PEFT."
        )
    for pattern, field in _PATTERNS.items():
        own = theirs.get(pattern) or {}
        if not isinstance(own, dict) or any(value != ours[field] for value in own.values()):
            raise CheckpointMismatch(
                f"{pattern} gives modules a {field} of their own ({own}), and a run has one for all; save an "
                "adapter of one rank and alpha, for instance by scaling B."
            )
    for field in sorted(theirs.keys() - {"peft_type", *ours, *_DEFAULTS, *_PATTERNS, *_WITHOUT_EFFECT}):
        if theirs[field] and (field, theirs[field]) != ("bias", "none"):
            raise CheckpointMismatch(f"{field} is {theirs[field]} in the checkpoint; only plain LoRA is loaded.")
