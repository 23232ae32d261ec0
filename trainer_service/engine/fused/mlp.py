"""The gated MLP of Llama-like models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn

from trainer_service.engine.fused.blocks import row_blocks
from trainer_service.engine.fused.lora_linear import shared_input


class FusedSwiglu(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6), with the modules of the layer that it replaces."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, [..., hidden], to the same shape."""
        gate, up = shared_input(x.reshape(-1, x.shape[-1]), self.gate_proj, self.up_proj)
        inner = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
        return self.down_proj(inner).view(x.shape)  # type: ignore[no-any-return]


class _Swiglu(autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for g, u, target in row_blocks(gate, up, out):
            torch.ops.aten.silu.out(g, out=target).mul_(u)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        for g, u, dout, dg, du in row_blocks(gate, up, gradients[0], dgate, dup):
            torch.ops.aten.silu_backward.grad_input(dout * u, g, grad_input=dg)
            torch.ops.aten.silu.out(g, out=du).mul_(dout)
        return dgate, dup
