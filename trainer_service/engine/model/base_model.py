"""The frozen base model that all runs of an engine share: its loading, the modes of its passes, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.base_model.model_directory import (
    Loading,
    ModelDamagedError,
    check_directory,
    check_fit,
    check_tied,
    why_not_loaded,
)
from paceline.errors import ModelNotFound, PacelineError, Unsupported
from paceline.types import PackingMode
from trainer_service.engine.model.fused_layers import ElementWork, check_compiler, fuse_layers, has_fused_family
from trainer_service.engine.model.packed_attention import PACKED_ATTENTION
from trainer_service.engine.weight_sharing import borrow_base_model
from trainer_service.engine_link.options import EngineOptions

STOCK_ATTENTION = "eager"
"""transformers' own attention, written as its formula: it includes whatever a model adds to attention."""


@dataclass(frozen=True, slots=True)
class PassMode:
    """One way to compute a model's passes: sequences packed in one row, or one at a time."""

    packing: PackingMode
    attention: str
    """Name of the attention implementation."""
    fused: bool = False
    """Whether the layers of known families are replaced by fused ones."""
    own_logits: bool = False
    """Whether the model computes all logits of a sequence itself, for instance because it scales or caps them."""

    @property
    def is_packed(self) -> bool:
        return self.packing is PackingMode.PACKED

    def __str__(self) -> str:
        sequences = "packed" if self.is_packed else "one sequence a pass"
        extra = f"{', fused layers' if self.fused else ''}{', its own logits' if self.own_logits else ''}"
        return f"{sequences}, attention {self.attention}{extra}"


FASTEST = PassMode(PackingMode.PACKED, PACKED_ATTENTION, fused=True)
"""The mode that is tried first."""
_OTHERS = (
    PassMode(PackingMode.PACKED, PACKED_ATTENTION),
    PassMode(PackingMode.ONE_SEQUENCE, "sdpa"),
    PassMode(PackingMode.ONE_SEQUENCE, STOCK_ATTENTION),
    PassMode(PackingMode.ONE_SEQUENCE, "sdpa", own_logits=True),
    PassMode(PackingMode.ONE_SEQUENCE, STOCK_ATTENTION, own_logits=True),
)


def modes_of(model: PreTrainedModel) -> tuple[PassMode, ...]:
    """Return the modes that may work for a model, the fastest first."""
    return (FASTEST, *_OTHERS) if has_fused_family(model) else _OTHERS


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switch a model to an attention implementation; of a model with several parts, only its language model.

    Raises Unsupported if the model does not support it.
    """
    part = model.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(part, PreTrainedModel) or part.config is model.config:
        part = model
    try:
        part.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise Unsupported(f"{type(model).__name__} does not support attention {name}.") from error
    if part.config._attn_implementation != name:  # noqa: SLF001 - there is no other way to ask
        raise Unsupported(f"{type(model).__name__} does not let its attention implementation be changed.")


def load_base_model(
    options: EngineOptions, *, fused: bool = True, examine: Callable[[PreTrainedModel], None] | None = None
) -> PreTrainedModel:
    """Load a base model, or borrow it from a sampler, and freeze it. It uses transformers' own attention.

    `fused` replaces layers of known families; before that, `examine` gets the model as transformers builds it. Raises
    ModelNotFound, Unsupported, BaseUnavailable, BaseMismatch.
    """
    try:
        borrowed = borrow_base_model(options, STOCK_ATTENTION)
        model = _from_files(options) if borrowed is None else borrowed
    except PacelineError:
        raise
    except (ModelDamagedError, OSError) as error:
        reason = why_not_loaded(error, Path(options.model_path))
        raise ModelNotFound(f"{options.model_path} cannot be loaded: {reason}.") from error
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise Unsupported(
            f"{options.model_name} cannot be served: {why_not_loaded(error, Path(options.model_path))}."
        ) from error
    model.requires_grad_(requires_grad=False)
    if options.compile:
        check_compiler(options.device)
    if options.ranks == 1:  # With several, sharding moves the model layer by layer.
        nn.Module.to(model, torch.device(options.device))
    model.train(mode=False)
    _reset_dynamic_rope(model)
    if examine is not None:
        examine(model)
    if fused:
        fuse_layers(model, ElementWork("inductor" if options.compile else None))
    if options.activation_checkpointing:
        _recompute_layers(model)
    return model


def _from_files(options: EngineOptions) -> PreTrainedModel:
    """Load a model of which every weight is in its files, and no weight is left over."""
    if (directory := Path(options.model_path)).exists():  # otherwise it is an id on a hub
        check_directory(directory)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        options.model_path,
        dtype=getattr(torch, options.dtype),
        attn_implementation=STOCK_ATTENTION,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # They are refused below, by name.
    )
    model: PreTrainedModel
    model, info = loaded
    text = model.config.get_text_config(decoder=True)
    check_fit(Loading.of(info), text.to_dict(), frozenset(name for name, _ in model.named_modules()))
    check_tied(model)
    _check_finite(model)
    return model


@torch.no_grad()
def _check_finite(model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        # The extremes show NaN and infinity in a fraction of the time that looking at each element takes.
        if weight.numel() and weight.is_floating_point() and not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise ModelDamagedError(f"{name} holds NaN or infinity; fetch or save the model again")


def _recompute_layers(model: PreTrainedModel) -> None:
    """Keep only each decoder layer's input and recompute the layer in the backward pass.

    Raises Unsupported. Nothing in a layer draws from torch's generator: dropout masks come from the routing.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise Unsupported(f"{type(model).__name__} does not support activation_checkpointing.")
    # Sets what transformers' own switch sets; the switch would also compute gradients for the embeddings. A layer
    # requires `training`, but only outside: within, it would turn the layer's own dropout on.
    for layer in layers:
        again = partial(_recomputed, layer)
        vars(layer).update(gradient_checkpointing=True, _gradient_checkpointing_func=again, training=True)


def _recomputed(layer: nn.Module, forward: Callable[..., object], *arguments: Any) -> object:
    def evaluate(*given: Any) -> object:
        layer.training = False
        try:
            return forward(*given)
        finally:
            layer.training = True

    return checkpoint(evaluate, *arguments, use_reentrant=False, preserve_rng_state=False)


def _reset_dynamic_rope(model: PreTrainedModel) -> None:
    """Reset dynamic rotary frequencies before each pass: transformers keeps those of the longest sequence so far."""

    def reset(module: Any, _arguments: Any) -> None:
        module.max_seq_len_cached = module.original_max_seq_len
        module.register_buffer("inv_freq", module.original_inv_freq.to(module.inv_freq.device), persistent=False)

    for module in model.modules():
        if any("dynamic" in kind for kind in _rope_types(module)) and hasattr(module, "original_inv_freq"):
            module.register_forward_pre_hook(reset)


def length_dependent_rope(model: PreTrainedModel) -> str:
    """Name the module whose rotary frequencies depend on the longest sequence of a pass; empty if none does.

    transformers changes them in the forward pass for these types only (modeling_rope_utils.dynamic_rope_update).
    """
    for name, module in model.named_modules():
        if any(kind == "longrope" or "dynamic" in kind for kind in _rope_types(module)):
            return f"{name} ({type(module).__name__})"
    return ""


def _rope_types(module: nn.Module) -> list[str]:
    kinds = getattr(module, "rope_type", ())
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else []


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
