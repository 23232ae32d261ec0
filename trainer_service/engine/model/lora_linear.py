"""Frozen linear layers with the low-rank updates of many runs, each computed for its own rows of a pass.

One routing says which rows belong to which run. The engine sets it once per pass, and every adapted layer reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, autograd, nn
from torch.nn import functional

from paceline.errors import Unsupported

_FEW_ROWS = 128
"""Most rows of a run for which its products are float32 on a CPU."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one run: consecutive, segment by segment."""

    run_id: str
    start: int
    stop: int
    """The row after the last one."""
    segments: tuple[tuple[int, int], ...]
    """Index in its request, and number of rows, of each of the run's segments."""
    seed: int | None = None
    """Seed of the dropout masks; None if nothing is dropped."""
    offset: int = 0
    """Rows of the segments before `start`."""

    def mask(self, layer: int, probability: float, like: Tensor) -> Tensor:
        """Draw the dropout mask, 0 or 1 / (1 - probability), for `like`, the input of these rows, [rows, in].

        It depends only on the seed, the layer and each segment's index in its request: not on what else is in the pass,
        nor on how often it is drawn.
        """
        generator = torch.Generator(like.device)
        parts = []
        for index, rows in self.segments:
            generator.manual_seed(_mix(_mix((self.seed or 0) + layer) + index))
            part = torch.empty(rows, like.shape[1], dtype=like.dtype, device=like.device)
            parts.append(part.bernoulli_(1 - probability, generator=generator))
        mask = torch.cat(parts)[self.offset : self.offset + self.stop - self.start]
        return mask.div_(1 - probability)


def clip(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the parts of the spans within rows `start` to `stop`, with rows counted from `start`."""
    inside = []
    for span in spans:
        first, last = max(span.start, start), min(span.stop, stop)
        if first < last:
            offset = span.offset + first - span.start
            inside.append(replace(span, start=first - start, stop=last - start, offset=offset))
    return inside


def _mix(value: int) -> int:
    """Turn neighbouring values into unrelated seeds with the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & 0x7FFFFFFFFFFFFFFF


class Routing:
    """The row spans of the pass that is being computed."""

    def __init__(self) -> None:
        self.spans: tuple[Span, ...] = ()

    @contextmanager
    def over(self, spans: Sequence[Span]) -> Iterator[None]:
        """Route a pass, forward and backward: layers may be recomputed in the backward pass."""
        self.spans = tuple(spans)
        try:
            yield
        finally:
            self.spans = ()


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

    def update_of(self, run_id: str) -> LowRank | None:
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
    # Runs without an adapter here take the same path, so that their sums do not depend on whether others have one.
    updates = _run_updates(x, adapted, spans)
    frozen = [layer.base_layer if isinstance(layer, AdaptedLinear) else layer for layer in layers]
    weights = [weight for layer in frozen for weight in (layer.weight, layer.bias)]
    factors = [factor for update in updates for low in update.lows for factor in (low.a, low.b)]
    return _LoraLinears.apply(x, updates, *weights, *factors)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _RunUpdate:
    """One run's update: its rows, the indices of the layers that it adapts, and its factors in each."""

    span: Span
    rows: slice
    places: list[int]
    lows: list[LowRank]
    ranks: list[int]
    layer: int
    """`AdaptedLinear.index` of the first adapted layer, from which dropout masks are drawn."""
    dtype: torch.dtype
    """dtype of the products.

    For few rows on a CPU that is float32: in bfloat16, rounding the factors and getting oneDNN's kernels, one for each
    new number of rows, takes longer than multiplying.
    """

    def mask(self, rows: Tensor) -> Tensor | None:
        """Draw the dropout mask for the run's rows; None if nothing is dropped."""
        dropout = self.lows[0].dropout
        return self.span.mask(self.layer, dropout, rows) if dropout and self.span.seed is not None else None


def _run_updates(x: Tensor, adapted: Mapping[int, AdaptedLinear], spans: Sequence[Span] | None) -> list[_RunUpdate]:
    first = next(iter(adapted.values()))
    spans = first.routing.spans if spans is None else spans
    updates = []
    for span in spans:
        lows = {place: low for place, layer in adapted.items() if (low := layer.update_of(span.run_id)) is not None}
        if lows:
            rows, ranks = slice(span.start, span.stop), [low.a.shape[0] for low in lows.values()]
            few = x.device.type == "cpu" and span.stop - span.start <= _FEW_ROWS
            dtype = torch.float32 if few else x.dtype
            updates.append(_RunUpdate(span, rows, [*lows], [*lows.values()], ranks, first.index, dtype))
    if updates and spans[-1].stop != len(x):
        raise Unsupported("a layer of this model does not see the rows of a pass in order; adapt other layers.")
    return updates


class _LoraLinears(autograd.Function):
    """Computes gradients for x, and for A and B of each update; weights and biases are frozen.

    The arguments after `updates` are each layer's weight and bias, then each update's A and B, layer by layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, updates: Sequence[_RunUpdate], *flat: Any) -> tuple[Tensor, ...]:
        count = (len(flat) - sum(2 * len(update.lows) for update in updates)) // 2
        weights, biases, factors = flat[: 2 * count : 2], flat[1 : 2 * count : 2], iter(flat[2 * count :])
        outs = tuple(functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        saved = []
        for update in updates:
            pairs = [(next(factors), next(factors)) for _ in update.lows]
            down = (torch.cat([a for a, _ in pairs]) if len(pairs) > 1 else pairs[0][0]).to(update.dtype)
            ups, rows = [b.to(update.dtype) for _, b in pairs], x[update.rows]
            mask = update.mask(rows)
            rows = (rows if mask is None else rows * mask).to(update.dtype)
            low = (rows @ down.t()).mul_(update.lows[0].scaling)
            for place, own, up in zip(update.places, torch.split(low, update.ranks, dim=1), ups, strict=True):
                _add_product(outs[place][update.rows], own, up.t())
            saved += [down, low, *ups]
        ctx.updates = updates
        ctx.save_for_backward(x, *weights, *saved)
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = len(gradients)
        x, *rest = ctx.saved_tensors
        weights, saved = rest[:count], iter(rest[count:])
        dx = _input_gradient(gradients, weights) if ctx.needs_input_grad[0] else None
        factors: list[Tensor] = []
        for update in ctx.updates:
            down, low = next(saved), next(saved)
            ups = [next(saved) for _ in update.lows]
            outs = [gradients[place][update.rows].to(down.dtype) for place in update.places]
            through = torch.cat([out @ up for out, up in zip(outs, ups, strict=True)], dim=1)
            through.mul_(update.lows[0].scaling)
            rows, mask = x[update.rows], update.mask(x[update.rows])
            if dx is not None and mask is None:
                _add_product(dx[update.rows], through, down)
            elif dx is not None:
                dx[update.rows] += (through @ down).mul_(mask)
            rows = (rows if mask is None else rows * mask).to(down.dtype)
            das = torch.split((through.t() @ rows).float(), update.ranks)
            for da, own, out in zip(das, torch.split(low, update.ranks, dim=1), outs, strict=True):
                factors += [da, _outer(out, own)]
        return dx, None, *([None] * (2 * count)), *factors


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
