"""RMSNorm with float32 statistics (arXiv 1910.07467, eq. 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn


class FusedRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; keeps x and one float32 for each row."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, [..., width]; the dtype stays."""
        return _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """With n = x / rms: dx = (g - n mean(g n)) / rms, where g = dy * weight; dweight = sum(dy n)."""
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        scale = None
        if ctx.needs_input_grad[1]:
            scale = (gradients[0] * normed).sum(dim=tuple(range(x.dim() - 1))).to(weight.dtype)
        upstream = gradients[0].float() * weight
        share = torch.linalg.vecdot(upstream, normed).unsqueeze(-1).div_(-x.shape[-1])
        dx = torch.addcmul(upstream, normed, share).mul_(inverse).to(x.dtype)
        return dx, scale, None
