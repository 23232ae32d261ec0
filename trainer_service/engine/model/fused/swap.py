"""Replace a model's layers by fused ones that compute the same."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from trainer_service.engine.model.fused.attention import FusedAttention
from trainer_service.engine.model.fused.blocks import RowWork
from trainer_service.engine.model.fused.mlp import FusedSwiglu
from trainer_service.engine.model.fused.norm import FusedRmsNorm

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose decoder layers consist of these three modules and whose rotary halves are equal."""
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def has_fused_family(model: PreTrainedModel) -> bool:
    """Return whether fused layers exist for a model."""
    return model.config.model_type in _FAMILIES


def fuse_layers(model: PreTrainedModel, work: RowWork | None = None) -> None:
    """Replace norms, MLPs and attention of a known family; leave any other model as it is.

    Names of weights and of linear layers stay. `work` runs the element-wise parts.
    """
    if not has_fused_family(model):
        return
    work = work or RowWork()
    for parent in reversed(list(model.modules())):  # Inner layers first: outer ones take them over.
        for name, child in list(parent.named_children()):
            replacement = _fused(child, model, work)
            if replacement is not None:
                setattr(parent, name, replacement)


def _fused(module: nn.Module, model: PreTrainedModel, work: RowWork) -> nn.Module | None:
    kind = type(module).__name__
    if kind in _NORMS:
        return FusedRmsNorm(module.weight, module.variance_epsilon, work)  # type: ignore[arg-type]
    if kind.endswith("MLP") and model.config.hidden_act == "silu":
        return FusedSwiglu(module, work)
    if kind.endswith("Attention"):
        return FusedAttention(module, _window(module, model), work)
    return None


def _window(layer: nn.Module, model: PreTrainedModel) -> int | None:
    if model.config.model_type == "mistral":
        return model.config.sliding_window  # type: ignore[no-any-return]
    return getattr(layer, "sliding_window", None)
