"""RMSNorm with float32 statistics (arXiv 1910.07467, eq. 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn

from trainer_service.engine.model.fused.blocks import RowWork, row_blocks


class FusedRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; saves x and one float32 per row for backward."""

    def __init__(self, weight: nn.Parameter, eps: float, work: RowWork | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._work = work or RowWork()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, [..., width], and keep its dtype."""
        return _RmsNorm.apply(x, self.weight, self.eps, self._work)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, work: RowWork) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, inverse = torch.empty_like(rows), torch.empty(len(rows), 1, device=x.device)
        work(_normalise, rows, out, inverse, _each_row(weight, rows), eps=eps)
        ctx.save_for_backward(rows, weight, inverse)
        ctx.work = work
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dout = gradients[0].reshape(x.shape)
        dx = torch.empty_like(x)
        ctx.work(_normalise_backward, x, dout, dx, inverse, _each_row(weight, x))
        dweight = _weight_gradient(x, dout, inverse, weight) if ctx.needs_input_grad[1] else None
        return dx.view(gradients[0].shape), dweight, None, None


def _each_row(weight: Tensor, rows: Tensor) -> Tensor:
    """Repeat the weight for each row, without a copy."""
    return weight.expand(len(rows), -1)


def _normalise(x: Tensor, out: Tensor, inverse: Tensor, weight: Tensor, *, eps: float) -> None:
    exact = x.float()
    inverse.copy_(torch.linalg.vecdot(exact, exact).unsqueeze(1)).div_(x.shape[-1]).add_(eps).rsqrt_()
    out.copy_(exact * inverse).mul_(weight)


def _normalise_backward(x: Tensor, dout: Tensor, dx: Tensor, inverse: Tensor, weight: Tensor) -> None:
    """Write dx = (g - n mean(g n)) / rms, where n = x / rms and g = dy * weight."""
    normed, g = x * inverse, dout.float() * weight[:1].float()
    share = torch.linalg.vecdot(g, normed).unsqueeze(1).div_(-x.shape[1])
    dx.copy_(g.addcmul_(normed, share).mul_(inverse))


def _weight_gradient(x: Tensor, dout: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Return sum(dy n) over the rows."""
    total = torch.zeros(weight.shape, device=x.device)
    for part, upstream, root in row_blocks(x, dout, inverse):
        total += (upstream.float() * (part * root)).sum(0)
    return total.to(weight.dtype)
