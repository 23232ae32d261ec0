"""Attention for packed sequences: each segment attends only to itself, with no mask over the pack.

In bfloat16 on a CPU and in half precision on a GPU it has kernels of its own; elsewhere torch attends segment by
segment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.nn import functional
from transformers import AttentionInterface

from paceline.errors import Unsupported

PACKED_ATTENTION = "paceline_packed"
"""Name of this `attn_implementation`. No mask function is registered under it, so transformers builds no mask."""

VARIANT = "attention_variant"
"""Key in error metadata: what a model adds to attention that only its own implementation computes."""

_HALVES = (torch.bfloat16, torch.float16)
_PLACES = "position_ids"
"""The one tensor beside queries, keys and values that models give to attention without an effect there."""
_BLOCK = 128
"""Queries whose scores exist at the same time in the backward pass on a CPU."""


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
        raise Unsupported(f"{type(module).__name__} does not forward segment_lengths to attention.")
    for name, given in variant.items():
        if (isinstance(given, Tensor) and name != _PLACES) or (name == "softcap" and given is not None):
            message = f"{type(module).__name__} uses {name}, which packed attention does not compute."
            raise Unsupported(message, metadata={VARIANT: name})
    # Not by indexing, whose derivative is a copy.
    rows = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
    windowed = sliding_window is not None and max(segment_lengths) > sliding_window
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and not windowed and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return causal_attention(*rows, segment_lengths, scale)[None], None
    if query.device.type == "cuda" and query.dtype in _HALVES and not dropout:
        return varlen_attention(*rows, segment_lengths, scaling, sliding_window)[None], None
    parts = zip(*(torch.split(x, list(segment_lengths), dim=2) for x in (query, key, value)), strict=True)
    outputs = [_segment_attention(q, k, v, sliding_window, scaling, dropout) for q, k, v in parts]
    # Contiguous because some models take a view of it.
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _segment_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None, dropout: float
) -> Tensor:
    length, mask = query.shape[2], None
    if window is not None and length > window:
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ones.triu(1 - window)
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


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    """Attend causally within segments of `lengths`, which sum to T, by FlashAttention (arXiv 2307.08691) on a GPU.

    One kernel computes the whole pack. `query` is [heads, T, head_dim], `key` and `value` [kv_heads, T, head_dim], in
    bfloat16 or float16; `window` is how many of the latest positions a position sees, None meaning all. Returns
    [T, heads, head_dim].
    """
    offsets, longest = segment_offsets(lengths, query.device), max(lengths)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return _varlen_kernel()(
        query, key, value, offsets, offsets, longest, longest, scale=scaling, window_size=reach(window)
    )


@cache
def _varlen_kernel() -> Callable[..., Tensor]:
    """Return torch's kernel, imported at the first call because that imports torch's compiler."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    # torch 2.12 needs a flag for grouped heads; the kernel of 2.11 accepts them without one.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **grouped)  # type: ignore[return-value]  # No statistics are requested: one tensor.


@lru_cache(maxsize=1)
def segment_offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the start of each segment, and T: int32, [segments + 1]. Cached because all layers of a pass use it."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def reach(window: int | None) -> tuple[int, int]:
    """Return how many positions before and after its own a position sees; -1 means all."""
    return (-1 if window is None else window - 1, 0)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float) -> Tensor:
    """Attend causally within segments of `lengths`, which sum to T, in bfloat16 on a CPU.

    `query` is [heads, T, head_dim], `key` and `value` [kv_heads, T, head_dim]; returns [T, heads, head_dim]. Forward
    uses torch's kernel, which is fast in bfloat16; its backward pass is slower than the products below, which run on
    the CPU's matrix units. Scores are recomputed, a block of queries at a time, against the keys up to its end.
    """
    return _CausalAttention.apply(query, key, value, lengths, scaling)  # type: ignore[no-any-return, no-untyped-call]


class _CausalAttention(autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scaling = lengths, scaling
        out = torch.empty(query.shape[1], query.shape[0], query.shape[2], dtype=query.dtype)
        splits = (torch.split(x, list(lengths), dim=1) for x in (query, key, value))
        for target, q, k, v in zip(torch.split(out, list(lengths)), *splits, strict=True):
            attended = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=scaling, enable_gqa=len(q) != len(k)
            )
            target.copy_(attended[0].transpose(0, 1))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        dquery, dkey, dvalue = (torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
        tensors = (query, key, value, gradients[0].transpose(0, 1), dquery, dkey, dvalue)
        for parts in zip(*(torch.split(x, list(ctx.lengths), dim=1) for x in tensors), strict=True):
            _segment_backward(parts, ctx.scaling)
        return dquery, dkey, dvalue, None, None


def _segment_backward(parts: tuple[Tensor, ...], scaling: float) -> None:
    """Write one segment's gradients. With P = softmax(s Q K^T): dV = P^T dO, dS = P (dO V^T - sum(dO V^T P)).

    `parts` are Q, K, V, dO, and dQ, dK, dV to write to. Products are fastest if the second factor is laid out in the
    order in which it is read, so K and V are transposed once for all blocks. Sums over blocks are float32: with many,
    an addend may be less than half a unit of a bfloat16 sum.
    """
    query, key, value, gradient, dquery, dkey, dvalue = parts
    kv_heads, length, width = key.shape
    key, turned_key, turned_value = key.contiguous(), key.mT.contiguous(), value.mT.contiguous()
    block = min(length, _BLOCK)
    # Added to scores, it hides later keys from each query.
    hiding = torch.full((block, block), -torch.inf, dtype=query.dtype).triu_(1)
    key_sum, value_sum = (torch.zeros(key.shape, dtype=torch.float32) for _ in range(2))
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        # Queries that share a key are rows of one product.
        q, g = (x[:, start:end].reshape(kv_heads, -1, width) for x in (query, gradient))
        q = q * scaling
        scores = torch.bmm(q, turned_key[..., :end])
        scores.view(-1, end - start, end)[..., start:] += hiding[: end - start, : end - start]
        weights = torch.softmax(scores, dim=-1)
        value_sum[:, :end] += torch.bmm(weights.mT, g)
        dweights = torch.bmm(g, turned_value[..., :end])
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)  # noqa: SLF001
        dquery[:, start:end] = torch.bmm(dscores, key[:, :end]).mul_(scaling).view(-1, end - start, width)
        key_sum[:, :end] += torch.bmm(dscores.mT, q)
    dkey.copy_(key_sum)
    dvalue.copy_(value_sum)
