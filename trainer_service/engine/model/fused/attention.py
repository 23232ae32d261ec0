"""The attention layer of Llama-like models on packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn

from trainer_service.engine.model.fused.blocks import RowWork
from trainer_service.engine.model.fused.lora_linear import shared_input
from trainer_service.engine.model.packed_attention import packed_attention


class FusedAttention(nn.Module):
    """Projections, rotary embedding and attention within segments, with the modules of the layer that it replaces.

    `window` is the layer's sliding window in positions; None if it has none.
    """

    def __init__(self, layer: Any, window: int | None, work: RowWork) -> None:
        super().__init__()
        self._work = work
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
        self.q_norm, self.k_norm = getattr(layer, "q_norm", None), getattr(layer, "k_norm", None)
        self.head_dim, self.scaling, self.window = layer.head_dim, layer.scaling, window

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        segment_lengths: tuple[int, ...],
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        """Attend within each segment of `hidden_states`, [1, T, hidden].

        `position_embeddings` are the cosines and sines, [1, T, head_dim], with both halves of the last dimension equal.
        """
        shape = (hidden_states.shape[1], -1, self.head_dim)
        rows = hidden_states.reshape(shape[0], -1)
        query, key, value = (x.view(shape) for x in shared_input(rows, self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (rotate(x, *position_embeddings, self._work) for x in (query, key))
        attended, _ = packed_attention(
            self,
            query[None],
            key[None],
            value.transpose(0, 1)[None],
            None,
            segment_lengths=segment_lengths,
            scaling=self.scaling,
            sliding_window=self.window,
        )
        return self.o_proj(attended.reshape(*hidden_states.shape[:2], -1)), None


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, work: RowWork) -> Tensor:
    """Apply rotary embedding (arXiv 2104.09864) in the half-split layout.

    `x` is [T, heads, head_dim]; returns [heads, T, head_dim].
    """
    half = x.shape[-1] // 2
    cosines, sines = cosines[0, :, :half], sines[0, :, :half]
    return _Rotate.apply(x.transpose(0, 1), cosines, sines, work)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, work: RowWork) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.work = work
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        work(_rotate, x, out, cosines[None], sines[None], dim=1)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Rotate back, laid out as the projection's output, [T, heads, head_dim]."""
        cosines, sines = ctx.saved_tensors
        heads, length, width = gradients[0].shape
        out = torch.empty(length, heads, width, dtype=gradients[0].dtype, device=gradients[0].device).transpose(0, 1)
        ctx.work(_rotate, gradients[0], out, cosines[None], -sines[None], dim=1)
        return out, None, None, None


def _rotate(x: Tensor, out: Tensor, cosines: Tensor, sines: Tensor) -> None:
    (first, second), (low, high) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    low.copy_(first).mul_(cosines).addcmul_(second, sines, value=-1)
    high.copy_(second).mul_(cosines).addcmul_(first, sines)
