"""Attention over packed sequences on a GPU: one kernel for the whole pack, with no mask."""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.12 needs a flag for grouped heads; the kernel of 2.11 accepts them without one.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    """Attend causally within segments of `lengths`, which sum to T, by FlashAttention (arXiv 2307.08691).

    `query` is [heads, T, head_dim], `key` and `value` [kv_heads, T, head_dim], in bfloat16 or float16; `window` is how
    many of the latest positions a position sees, None meaning all. Returns [T, heads, head_dim].
    """
    offsets, longest = segment_offsets(lengths, query.device), max(lengths)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    return varlen_attn(  # type: ignore[return-value]  # No statistics are requested, so this is one tensor.
        query, key, value, offsets, offsets, longest, longest, scale=scaling, window_size=reach(window), **_GROUPED
    )


@lru_cache(maxsize=1)
def segment_offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the start of each segment, and T: int32, [segments + 1]. Cached because all layers of a pass use it."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def reach(window: int | None) -> tuple[int, int]:
    """Return how many positions before and after its own a position sees; -1 means all."""
    return (-1 if window is None else window - 1, 0)
