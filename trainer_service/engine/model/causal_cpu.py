"""Causal attention in bfloat16 on a CPU, with a backward pass of matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, autograd
from torch.nn import functional

_BLOCK = 128
"""Queries whose scores exist at the same time in the backward pass."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float) -> Tensor:
    """Attend causally within segments of `lengths`, which sum to T.

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
    order in which it is read, so K and V are transposed once for all blocks.
    """
    query, key, value, gradient, dquery, dkey, dvalue = parts
    kv_heads, length, width = key.shape
    key, turned_key, turned_value = key.contiguous(), key.mT.contiguous(), value.mT.contiguous()
    hiding = _hiding(min(length, _BLOCK), query.dtype)
    dkey.zero_()
    dvalue.zero_()
    for start, end in _blocks(length):
        # Queries that share a key are rows of one product.
        q, g = (x[:, start:end].reshape(kv_heads, -1, width) for x in (query, gradient))
        q = q * scaling
        scores = torch.bmm(q, turned_key[..., :end])
        scores.view(-1, end - start, end)[..., start:] += hiding[: end - start, : end - start]
        weights = torch.softmax(scores, dim=-1)
        dvalue[:, :end].baddbmm_(weights.mT, g)
        dweights = torch.bmm(g, turned_value[..., :end])
        dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)  # noqa: SLF001
        dquery[:, start:end] = torch.bmm(dscores, key[:, :end]).mul_(scaling).view(-1, end - start, width)
        dkey[:, :end].baddbmm_(dscores.mT, q)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, _BLOCK):
        yield start, min(start + _BLOCK, length)


def _hiding(queries: int, dtype: torch.dtype) -> Tensor:
    """Return a [queries, queries] mask that, added to scores, hides later keys from each query."""
    return torch.full((queries, queries), -torch.inf, dtype=dtype).triu_(1)
