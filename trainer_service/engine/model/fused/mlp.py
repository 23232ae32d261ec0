"""The gated MLP of Llama-like models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd, nn

from trainer_service.engine.model.fused.blocks import RowWork
from trainer_service.engine.model.fused.lora_linear import shared_input


class FusedSwiglu(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6), with the modules of the layer that it replaces."""

    def __init__(self, mlp: Any, work: RowWork) -> None:
        super().__init__()
        self._work = work
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, [..., hidden], to the same shape."""
        gate, up = shared_input(x.reshape(-1, x.shape[-1]), self.gate_proj, self.up_proj)
        inner = _Swiglu.apply(gate, up, self._work)  # type: ignore[no-untyped-call]
        return self.down_proj(inner).view(x.shape)  # type: ignore[no-any-return]


class _Swiglu(autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, work: RowWork) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.work = work
        out = torch.empty_like(gate)
        work(_swiglu, gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        ctx.work(_swiglu_backward, gate, up, gradients[0], dgate, dup)
        return dgate, dup, None


def _swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu.out(gate, out=out).mul_(up)


def _swiglu_backward(gate: Tensor, up: Tensor, dout: Tensor, dgate: Tensor, dup: Tensor) -> None:
    torch.ops.aten.mul.out(dout, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    torch.ops.aten.silu.out(gate, out=dup).mul_(dout)
