"""Frozen linear layers and the low-rank updates of many runs in one operation, for layers that share their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, autograd, nn
from torch.nn import functional

from paceline.errors import Unsupported
from trainer_service.engine.model.row_spans import Routing, Span

_FEW_ROWS = 128
"""Most rows of a run for which its products are float32 on a CPU."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A run's update of a layer: x W^T becomes x W^T + scaling (dropout(x) A^T) B^T (LoRA, arXiv 2106.09685, eq. 3)."""

    a: Tensor
    """A, float32, [rank, in]."""
    b: Tensor
    """B, float32, [out, rank]."""
    scaling: float
    dropout: float
    """Probability that an element of the input is dropped in training."""


class AdaptedLinear(PeftLinear):
    """PEFT's LoRA layer with one adapter per run, computed for the rows of many runs at once.

    The routing says which rows belong to which run; rows of a run without an adapter here go through the frozen layer
    alone. Adapters stay float32; for many rows, each pass rounds them once to the dtype of the input.
    """

    routing: Routing
    index: int
    """Index of the layer, which makes its dropout differ from that of other layers."""

    def part(self, run_id: str) -> LowRank | None:
        """Return a run's update of this layer; None if it has none."""
        if run_id not in self.lora_A:
            return None
        dropout = getattr(self.lora_dropout[run_id], "p", 0.0)  # PEFT has an Identity for 0.
        a, b = cast("nn.Linear", self.lora_A[run_id]), cast("nn.Linear", self.lora_B[run_id])
        return LowRank(a.weight, b.weight, self.scaling[run_id], dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x`, [..., in], the rows of the pass; return [..., out] in the dtype of `x`."""
        (out,) = shared_input(x.reshape(-1, x.shape[-1]), self)
        return out.view(*x.shape[:-1], -1)


def shared_input(x: Tensor, *layers: nn.Module, spans: Sequence[Span] | None = None) -> Sequence[Tensor]:
    """Apply layers to the same `x`, [rows, in]; return one [rows, out] for each.

    `spans` assigns rows to runs if they are not the rows of the pass. A run's low-rank updates of these layers are one
    product, their gradients for `x` are accumulated by the products themselves, and they share a dropout mask.
    """
    adapted = {place: layer for place, layer in enumerate(layers) if isinstance(layer, AdaptedLinear)}
    if not adapted:
        return [layer(x) for layer in layers]
    # Runs without a part here take the same path, so that their sums do not depend on whether others have one.
    parts = _parts(x, adapted, spans)
    frozen = [layer.base_layer if isinstance(layer, AdaptedLinear) else layer for layer in layers]
    weights = [weight for layer in frozen for weight in (layer.weight, layer.bias)]
    factors = [factor for part in parts for low in part.lows for factor in (low.a, low.b)]
    return _LoraLinears.apply(x, parts, *weights, *factors)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Part:
    """One run's update: its rows, the indices of the layers that it adapts, and its factors in each."""

    span: Span
    places: tuple[int, ...]
    lows: tuple[LowRank, ...]
    layer: int
    """`AdaptedLinear.index` of the first adapted layer, from which dropout masks are drawn."""

    def mask(self, rows: Tensor) -> Tensor | None:
        """Draw the dropout mask for the run's rows; None if nothing is dropped."""
        dropout = self.lows[0].dropout
        return self.span.mask(self.layer, dropout, rows) if dropout and self.span.seed is not None else None

    def dropped(self, rows: Tensor) -> Tensor:
        """Apply the dropout mask to the run's rows."""
        mask = self.mask(rows)
        return rows if mask is None else rows * mask

    def dtype(self, x: Tensor) -> torch.dtype:
        """Choose the dtype of the products.

        For few rows on a CPU that is float32: in bfloat16, rounding the factors and getting oneDNN's kernels, one for
        each new number of rows, takes longer than multiplying.
        """
        few = x.device.type == "cpu" and self.span.stop - self.span.start <= _FEW_ROWS
        return torch.float32 if few else x.dtype

    def columns(self, whole: Tensor) -> Sequence[Tensor]:
        """Split [rows, sum of ranks] by layer."""
        return torch.split(whole, [low.a.shape[0] for low in self.lows], dim=1)


def _parts(x: Tensor, adapted: Mapping[int, AdaptedLinear], spans: Sequence[Span] | None) -> list[_Part]:
    first = next(iter(adapted.values()))
    parts = []
    for span in first.routing.spans if spans is None else spans:
        lows = {place: low for place, layer in adapted.items() if (low := layer.part(span.run_id)) is not None}
        if lows:
            parts.append(_Part(span, tuple(lows), tuple(lows.values()), first.index))
    if parts and (spans or first.routing.spans)[-1].stop != len(x):
        raise Unsupported("a layer of this model does not see the rows of a pass in order; adapt other layers.")
    return parts


class _LoraLinears(autograd.Function):
    """Computes gradients for x, and for A and B of each part; weights and biases are frozen.

    The arguments after `parts` are each layer's weight and bias, then each part's A and B, layer by layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[_Part], *flat: Any) -> tuple[Tensor, ...]:
        count = (len(flat) - sum(2 * len(part.lows) for part in parts)) // 2
        weights, biases, factors = flat[: 2 * count : 2], flat[1 : 2 * count : 2], iter(flat[2 * count :])
        outs = tuple(functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        saved = []
        for part in parts:
            pairs, dtype = [(next(factors), next(factors)) for _ in part.lows], part.dtype(x)
            down, ups = _side_by_side([a for a, _ in pairs]).to(dtype), [b.to(dtype) for _, b in pairs]
            low = (part.dropped(x[part.span.rows]).to(dtype) @ down.t()).mul_(part.lows[0].scaling)
            for place, own, up in zip(part.places, part.columns(low), ups, strict=True):
                _add_product(outs[place][part.span.rows], own, up.t())
            saved += [down, low, *ups]
        ctx.parts = parts
        ctx.save_for_backward(x, *weights, *saved)
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = len(gradients)
        x, *rest = ctx.saved_tensors
        weights, saved = rest[:count], iter(rest[count:])
        dx = _input_gradient(gradients, weights) if ctx.needs_input_grad[0] else None
        factors: list[Tensor] = []
        for part in ctx.parts:
            down, low = next(saved), next(saved)
            ups = [next(saved) for _ in part.lows]
            outs = [gradients[place][part.span.rows].to(down.dtype) for place in part.places]
            through = torch.cat([out @ up for out, up in zip(outs, ups, strict=True)], dim=1)
            through.mul_(part.lows[0].scaling)
            rows, mask = x[part.span.rows], part.mask(x[part.span.rows])
            if dx is not None and mask is None:
                _add_product(dx[part.span.rows], through, down)
            elif dx is not None:
                dx[part.span.rows] += (through @ down).mul_(mask)
            rows = (rows if mask is None else rows * mask).to(down.dtype)
            das = torch.split((through.t() @ rows).float(), [up.shape[1] for up in ups])
            for da, own, out in zip(das, part.columns(low), outs, strict=True):
                factors += [da, _outer(out, own)]
        return dx, None, *([None] * (2 * count)), *factors


def _side_by_side(factors: list[Tensor]) -> Tensor:
    return torch.cat(factors) if len(factors) > 1 else factors[0]


def _add_product(into: Tensor, one: Tensor, other: Tensor) -> None:
    """Add a product, in float32 or the dtype of `into`, and round the sum once."""
    if into.dtype == one.dtype:
        into.addmm_(one, other)
    else:
        into.copy_(into.float().addmm_(one, other))


def _input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    dx = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        dx.addmm_(gradient, weight)
    return dx


def _outer(gradient: Tensor, low: Tensor) -> Tensor:
    """Return gradient^T low, [out, rank], in float32."""
    if low.dtype == torch.float32:
        return gradient.t() @ low
    # oneDNN is slow with a long transposed factor; transposing the small result costs no more than rounding it.
    return (low.t() @ gradient).t().to(torch.float32, memory_format=torch.contiguous_format)
