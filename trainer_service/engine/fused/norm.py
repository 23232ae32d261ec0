"""RMSNorm with float32 statistics (arXiv 1910.07467, eq. 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn

from trainer_service.engine.fused.blocks import row_blocks


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
        rows = x.reshape(-1, x.shape[-1])
        out, inverse = torch.empty_like(rows), torch.empty(len(rows), 1, device=x.device)
        for part, target, root in row_blocks(rows, out, inverse):
            exact = part.float()
            root.copy_(torch.linalg.vecdot(exact, exact).unsqueeze(1)).div_(x.shape[-1]).add_(eps).rsqrt_()
            target.copy_(exact * root).mul_(weight)
        ctx.save_for_backward(rows, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """With n = x / rms: dx = (g - n mean(g n)) / rms, where g = dy * weight; dweight = sum(dy n)."""
        x, weight, inverse = ctx.saved_tensors
        dout = gradients[0].reshape(x.shape)
        dx = torch.empty_like(x)
        dweight = torch.zeros(weight.shape, device=x.device) if ctx.needs_input_grad[1] else None
        for part, upstream, target, root in row_blocks(x, dout, dx, inverse):
            normed = part * root
            if dweight is not None:
                dweight += (upstream * normed).sum(0)
            g = upstream.float() * weight
            share = torch.linalg.vecdot(g, normed).unsqueeze(1).div_(-x.shape[1])
            target.copy_(g.addcmul_(normed, share).mul_(root))
        return dx.view(gradients[0].shape), None if dweight is None else dweight.to(weight.dtype), None
