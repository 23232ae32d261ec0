"""The frozen base model that all runs of an engine share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.errors import ModelNotFound, Unsupported
from trainer_service.engine.model.fused.blocks import RowWork
from trainer_service.engine.model.fused.compiler import check_compiler
from trainer_service.engine.model.fused.swap import fuse_layers
from trainer_service.engine.model.pass_mode import STOCK_ATTENTION, PassMode
from trainer_service.engine.model.rope import forget_lengths
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.weight_sharing.imported_base import borrow_base_model, is_borrowed


def load_base_model(
    options: EngineOptions, *, fused: bool = True, examine: Callable[[PreTrainedModel], None] | None = None
) -> PreTrainedModel:
    """Load a base model, or borrow it from a sampler, and freeze it. It uses transformers' own attention.

    `fused` replaces layers of known families; before that, `examine` gets the model as transformers builds it. Raises
    ModelNotFound, Unsupported, BaseUnavailable, BaseMismatch.
    """
    try:
        model = borrow_base_model(options, STOCK_ATTENTION) if is_borrowed(options) else _from_files(options)
    except OSError as error:
        raise ModelNotFound(f"{options.model_name} cannot be loaded; check the model's path or id.") from error
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise Unsupported(f"{options.model_name} cannot be served: {_first_line(error)}") from error
    model.requires_grad_(requires_grad=False)
    if options.compile:
        check_compiler(options.device)
    if options.ranks == 1:  # With several, sharding moves the model layer by layer.
        nn.Module.to(model, torch.device(options.device))
    model.train(mode=False)
    forget_lengths(model)
    if examine is not None:
        examine(model)
    if fused:
        fuse_layers(model, RowWork("inductor" if options.compile else None))
    if options.activation_checkpointing:
        _recompute_layers(model)
    return model


def _from_files(options: EngineOptions) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        options.model_path,
        dtype=getattr(torch, options.dtype),
        attn_implementation=STOCK_ATTENTION,
        use_safetensors=True,
        trust_remote_code=False,
    )
    return model


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{lines[0].strip().rstrip('.')}." if lines else f"{type(error).__name__}."


def _recompute_layers(model: PreTrainedModel) -> None:
    """Keep only each decoder layer's input and recompute the layer in the backward pass.

    Raises Unsupported. Nothing in a layer draws from torch's generator: dropout masks come from the routing.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise Unsupported(f"{type(model).__name__} does not support activation_checkpointing.")
    # Sets what transformers' own switch sets; the switch would also compute gradients for the embeddings. A layer
    # requires `training`; its submodules stay in evaluation mode.
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for layer in layers:
        vars(layer).update(gradient_checkpointing=True, _gradient_checkpointing_func=again, training=True)


def backbone(model: PreTrainedModel) -> nn.Module:
    """Find the part of a causal LM below its output head; it returns hidden states after the last norm."""
    for name in (model.base_model_prefix, "model"):
        if isinstance(part := getattr(model, name, None), nn.Module):
            return part
    raise Unsupported(f"{type(model).__name__} has no part below its output head that can be called.")


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Find the list of a causal LM's decoder layers; empty if there is none.

    The language model is searched first, because a vision tower may have as many layers.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    parts: tuple[nn.Module, ...] = (model.get_decoder(), backbone(model))  # type: ignore[no-untyped-call]
    lists = (module for part in parts for module in part.modules() if isinstance(module, nn.ModuleList))
    return next((list(module) for module in lists if len(module) == count), [])


def output_head(model: PreTrainedModel) -> nn.Module:
    """Find the output head, including any adapters that runs have on it."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def hidden_states(
    model: PreTrainedModel, mode: PassMode, input_ids: Tensor, position_ids: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Compute the output head's input, [1, T, hidden], for segments of `lengths`, which sum to T.

    `input_ids` and `position_ids` are [1, T]. Unless `mode` is packed, the model gets `input_ids` alone.
    """
    packed: dict[str, Any] = {"position_ids": position_ids, "segment_lengths": lengths} if mode.is_packed else {}
    out: Tensor = backbone(model)(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
    return out


def own_logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Compute the logits, [T, vocabulary], of one sequence, [1, T], with everything that the model does to them."""
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits.squeeze(0)
