"""Rotary frequencies that depend on a sequence's length."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def company_in_rope(model: PreTrainedModel) -> str:
    """Name the module whose rotary frequencies depend on the longest sequence of a pass; empty if none does.

    transformers changes them in the forward pass for these types only (modeling_rope_utils.dynamic_rope_update).
    """
    for name, module in model.named_modules():
        if any(_depends_on_length(kind) for kind in _rope_types(module)):
            return f"{name} ({type(module).__name__})"
    return ""


def forget_lengths(model: PreTrainedModel) -> None:
    """Reset dynamic rotary frequencies before each pass: transformers keeps those of the longest sequence so far."""

    def forget(module: Any, _arguments: Any) -> None:
        module.max_seq_len_cached = module.original_max_seq_len
        module.register_buffer("inv_freq", module.original_inv_freq.to(module.inv_freq.device), persistent=False)

    for module in model.modules():
        if any("dynamic" in kind for kind in _rope_types(module)) and hasattr(module, "original_inv_freq"):
            module.register_forward_pre_hook(forget)


def _rope_types(module: nn.Module) -> list[str]:
    kinds = getattr(module, "rope_type", ())
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else []


def _depends_on_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind
