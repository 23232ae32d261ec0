"""Frozen linear layers and their low-rank updates as one operation, for layers that read the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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

    def forward(self, x: Tensor) -> Tensor:
        """Compute x W^T + bias + s (dropout(x) A^T) B^T with the active adapter, if it has a part here.

        `x` is [..., in]; returns [..., out] in the dtype of `x`.
        """
        name = self.active_part
        if name is None:
            return self.base_layer(x)  # type: ignore[no-any-return]
        if not self.drops:
            (out,) = shared_input(x.reshape(-1, x.shape[-1]), self)
            return out.view(*x.shape[:-1], -1)
        _, _, a, b, scaling = self.weights
        low = functional.linear(self.lora_dropout[name](x), a.to(x.dtype))
        return self.base_layer(x) + functional.linear(low, (b * scaling).to(x.dtype))  # type: ignore[no-any-return]

    @property
    def weights(self) -> tuple[Any, ...]:
        """W, bias or None, A, B and scaling of the active adapter, which must have a part here."""
        name, base = self.active_part, self.base_layer
        return base.weight, base.bias, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]  # type: ignore[index]

    @property
    def drops(self) -> bool:
        """Whether the active adapter's dropout acts now."""
        name = self.active_part
        dropout = nn.Identity() if name is None else self.lora_dropout[name]
        return dropout.training and not isinstance(dropout, nn.Identity)


def shared_input(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Apply layers to the same `x`, [rows, in]; returns one [rows, out] each.

    Their low-rank parts are one product, and their gradients for `x` are summed in the products themselves.
    """
    fused = [layer for layer in layers if isinstance(layer, FusedLoraLinear) and layer.active_part is not None]
    if len(fused) < len(layers) or any(layer.drops for layer in fused):
        return [layer(x) for layer in layers]
    return _LoraLinears.apply(x, *(weight for layer in fused for weight in layer.weights))  # type: ignore[no-any-return, no-untyped-call]


class _LoraLinears(autograd.Function):
    """Gradients for x, and for each layer's A and B; W and the bias are frozen. Layers come as (W, bias, A, B, s)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *flat: Any) -> tuple[Tensor, ...]:
        layers = [flat[i : i + 5] for i in range(0, len(flat), 5)]
        down = torch.cat([a for _, _, a, _, _ in layers]).to(x.dtype)
        ups = [(b * scaling).to(x.dtype) for _, _, _, b, scaling in layers]
        ctx.ranks, ctx.scalings = [up.shape[1] for up in ups], [layer[4] for layer in layers]
        lows = [low.contiguous() for low in torch.split(x @ down.t(), ctx.ranks, dim=1)]
        ctx.save_for_backward(x, down, *(layer[0] for layer in layers), *ups, *lows)
        return tuple(
            functional.linear(x, weight, bias).addmm_(low, up.t())
            for (weight, bias, *_), low, up in zip(layers, lows, ups, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, down, *rest = ctx.saved_tensors
        count = len(gradients)
        weights, ups, lows = rest[:count], rest[count : 2 * count], rest[2 * count :]
        through = torch.cat([out @ up for out, up in zip(gradients, ups, strict=True)], dim=1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = through @ down
            for out, weight in zip(gradients, weights, strict=True):
                dx.addmm_(out, weight)
        das = torch.split((through.t() @ x).float(), ctx.ranks)
        dbs = [
            (low.t() @ out).t().float().mul(scaling).contiguous()
            for low, out, scaling in zip(lows, gradients, ctx.scalings, strict=True)
        ]
        return dx, *(g for da, db in zip(das, dbs, strict=True) for g in (None, None, da, db, None))
