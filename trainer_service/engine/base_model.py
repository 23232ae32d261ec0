"""The frozen base model that all runs of an engine share."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.errors import ModelNotFound, Unsupported
from trainer_service.engine.attention import PACKED_ATTENTION
from trainer_service.engine.fused.swap import fuse_layers
from trainer_service.engine.options import EngineOptions

_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config fields of models whose logits are more than head(hidden)."""


def load_base_model(options: EngineOptions) -> PreTrainedModel:
    """Load, check and freeze a base model.

    Raises ModelNotFound, or Unsupported for a model whose logits would come out wrong.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            options.model_path,
            dtype=getattr(torch, options.dtype),
            attn_implementation=PACKED_ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except OSError as error:
        raise ModelNotFound(f"{options.model_name} cannot be loaded; check the model's path or id.") from error
    for setting in _LOGIT_SETTINGS:
        if getattr(model.config, setting, None) not in (None, 1.0):
            raise Unsupported(f"{options.model_name} has {setting}, which this engine does not compute.")
    model.requires_grad_(requires_grad=False)
    fuse_layers(model)
    if options.ranks == 1:  # else it is moved as it is dealt over them, layer by layer
        nn.Module.to(model, torch.device(options.device))
    model.train(mode=False)
    return model


def backbone(model: PreTrainedModel) -> nn.Module:
    """Find the part of a causal LM below its output head; it gives hidden states after the last norm."""
    return model.get_submodule(model.base_model_prefix)


def output_head(model: PreTrainedModel) -> nn.Module:
    """Find the output head, with its adapters if runs have some there."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head
