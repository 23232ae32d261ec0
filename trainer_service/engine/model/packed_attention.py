"""Attention for packed sequences: each segment attends only to itself, with no mask over the pack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from paceline.errors import Unsupported
from trainer_service.engine.model.causal_cpu import causal_attention

PACKED_ATTENTION = "paceline_packed"
"""Name of this `attn_implementation`. No mask function is registered under it, so transformers builds no mask."""

VARIANT = "attention_variant"
"""Key in error metadata: what a model adds to attention that only its own implementation computes."""

_HALVES = (torch.bfloat16, torch.float16)
_UNSERVED = ("softcap", "s_aux", "position_bias")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    segment_lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **variant: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each segment of a pack.

    The mask is ignored, although models pass one.

    `query` is [1, heads, T, head_dim], `key` and `value` [1, kv_heads, T, head_dim] (GQA), `segment_lengths` sums to T.
    Returns [1, T, heads, head_dim] in the dtype of `query`. Raises Unsupported for variants of attention that it would
    otherwise ignore.
    """
    if segment_lengths is None:
        raise Unsupported(f"{type(module).__name__} does not pass on where sequences begin.")
    for name in _UNSERVED:
        if variant.get(name) is not None:
            message = f"{type(module).__name__} uses {name}, which packed attention does not compute."
            raise Unsupported(message, metadata={VARIANT: name})
    # Not by indexing, whose derivative is a copy.
    rows = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
    windowed = sliding_window is not None and max(segment_lengths) > sliding_window
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and not windowed and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return causal_attention(*rows, segment_lengths, scale)[None], None
    if query.device.type == "cuda" and query.dtype in _HALVES and not dropout:
        from trainer_service.engine.model.varlen_gpu import varlen_attention  # noqa: PLC0415 - imports torch's compiler

        return varlen_attention(*rows, segment_lengths, scaling, sliding_window)[None], None
    parts = zip(*(torch.split(x, list(segment_lengths), dim=2) for x in (query, key, value)), strict=True)
    outputs = [_segment_attention(q, k, v, sliding_window, scaling, dropout) for q, k, v in parts]
    # Contiguous because some models take a view of it.
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _segment_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None, dropout: float
) -> Tensor:
    mask = _window_mask(query.shape[2], window, query.device)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return a mask of the `window` latest positions; None if the segment is not longer."""
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
