"""A frozen linear layer and its low-rank update as one operation."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, autograd, nn
from torch.nn import functional


class FusedLoraLinear(PeftLinear):
    """PEFT's LoRA linear, computed in the dtype of the base weights.

    Adapter weights stay float32; each pass rounds them once, with the scaling folded into B. The product is added to
    the base layer's output in place, so nothing but the input and x A^T is kept for the backward pass.
    """

    @property
    def active_part(self) -> str | None:
        """Name of the active adapter, if it has a part in this layer."""
        return next((name for name in self.active_adapters if name in self.lora_A), None)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Compute x W^T + bias + s (dropout(x) A^T) B^T with the active adapter, if it has a part here.

        `x` is [..., in]; returns [..., out] in the dtype of `x`.
        """
        name = self.active_part
        if name is None:
            return self.base_layer(x)  # type: ignore[no-any-return]
        base, dropout = self.base_layer, self.lora_dropout[name]
        a, b, scaling = self.lora_A[name].weight, self.lora_B[name].weight, float(self.scaling[name])
        if isinstance(dropout, nn.Identity) or not dropout.training:
            return _LoraLinear.apply(x, base.weight, base.bias, a, b, scaling)  # type: ignore[no-any-return, no-untyped-call]
        low = functional.linear(dropout(x), a.to(x.dtype))
        return base(x) + functional.linear(low, (b * scaling).to(x.dtype))  # type: ignore[no-any-return]


class _LoraLinear(autograd.Function):
    """Gradients for x, A and B; W and the bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        down, up = a.to(x.dtype), (b * scaling).to(x.dtype)
        low = rows @ down.t()
        out = functional.linear(rows, weight, bias).addmm_(low, up.t())
        ctx.save_for_backward(rows, weight, low, down, up)
        ctx.scaling, ctx.shape = scaling, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, low, down, up = ctx.saved_tensors
        out = gradients[0].reshape(rows.shape[0], -1)
        through = out @ up
        x = a = b = None
        if ctx.needs_input_grad[0]:
            x = (out @ weight).addmm_(through, down).view(ctx.shape)
        if ctx.needs_input_grad[3]:
            a = (through.t() @ rows).float()
        if ctx.needs_input_grad[4]:
            b = (low.t() @ out).t().float().mul(ctx.scaling).contiguous()
        return x, None, None, a, b, None
