"""The gated MLP of Llama-like models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.nn import functional


class FusedSwiglu(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6), with the modules of the layer that it replaces."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, [..., hidden], to the same shape."""
        inner = _Swiglu.apply(self.gate_proj(x), self.up_proj(x))  # type: ignore[no-untyped-call]
        return self.down_proj(inner)  # type: ignore[no-any-return, operator]


class _Swiglu(autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dup = functional.silu(gate).mul_(gradients[0])
        dgate = torch.ops.aten.silu_backward(gradients[0] * up, gate)
        return dgate, dup
