"""Frozen linear layers with the low-rank updates of many runs, each computed for its own rows of a pass.

One routing says which rows belong to which run. The engine sets it once per pass, and every adapted layer reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class AdaptedLinear(PeftLinear):
    """PEFT's LoRA layer with one adapter per run, computed for the rows of many runs at once.

    The routing says which rows belong to which run; rows of a run without an adapter here go through the frozen layer
    alone. Adapters stay float32; for many rows, each pass rounds them once to the dtype of the input.
    """

    routing: Routing
    index: int
    """Index of the layer, which makes its dropout differ from that of other layers."""

    def forward(self, x: Tensor, spans: Sequence[Span] | None = None) -> Tensor:
        """Apply the layer to `x`, [..., in], the rows of the pass; return [..., out] in the dtype of `x`.

        `spans` assigns rows to runs if they are not the rows of the pass.
        """
        rows = x.reshape(-1, x.shape[-1])
        updates = self._updates(rows, self.routing.spans if spans is None else spans)
        factors = [factor for update in updates for factor in (update.a, update.b)]
        # Runs without an adapter here take the same path, so that their sums do not depend on whether others have one.
        out = _LoraLinear.apply(rows, self.base_layer.weight, self.base_layer.bias, updates, *factors)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    def _updates(self, x: Tensor, spans: Sequence[Span]) -> list[_RunUpdate]:
        updates = []
        for span in spans:
            if span.run_id in self.lora_A:
                a, b = (cast("nn.Linear", factors[span.run_id]).weight for factors in (self.lora_A, self.lora_B))
                dropout = getattr(self.lora_dropout[span.run_id], "p", 0.0)  # PEFT has an Identity for 0.
                few = x.device.type == "cpu" and span.stop - span.start <= _FEW_ROWS
                dtype = torch.float32 if few else x.dtype
                updates.append(_RunUpdate(span, a, b, self.scaling[span.run_id], dropout, self.index, dtype))
        if updates and spans[-1].stop != len(x):
            raise Unsupported("a layer of this model does not see the rows of a pass in order; adapt other layers.")
        return updates


@dataclass(frozen=True, slots=True)
class _RunUpdate:
    """A run's update of a layer: x W^T becomes x W^T + scaling (dropout(x) A^T) B^T (LoRA, arXiv 2106.09685, eq. 3)."""

    span: Span
    a: Tensor
    """A, float32, [rank, in]."""
    b: Tensor
    """B, float32, [out, rank]."""
    scaling: float
    dropout: float
    """Probability that an element of the input is dropped in training."""
    layer: int
    """`AdaptedLinear.index`, from which the dropout mask is drawn."""
    dtype: torch.dtype
    """dtype of the products.

    For few rows on a CPU that is float32: in bfloat16, rounding the factors and getting oneDNN's kernels, one for each
    new number of rows, takes longer than multiplying.
    """

    def mask(self, rows: Tensor) -> Tensor | None:
        """Draw the dropout mask for the run's rows; None if nothing is dropped."""
        return self.span.mask(self.layer, self.dropout, rows) if self.dropout and self.span.seed is not None else None


class _LoraLinear(autograd.Function):
    """Computes gradients for x, and for A and B of each update; weight and bias are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, updates: Sequence[_RunUpdate], *factors: Any) -> Tensor:
        out, saved = functional.linear(x, weight, bias), []
        for update, a, b in zip(updates, factors[::2], factors[1::2], strict=True):
            rows = x[update.span.start : update.span.stop]
            mask = update.mask(rows)
            down, up = a.to(update.dtype), b.to(update.dtype)
            low = ((rows if mask is None else rows * mask).to(update.dtype) @ down.t()).mul_(update.scaling)
            _add_product(out[update.span.start : update.span.stop], low, up.t())
            saved += [down, up, low]
        ctx.updates = updates
        ctx.save_for_backward(x, weight, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        dx = gradients[0] @ weight if ctx.needs_input_grad[0] else None
        factors: list[Tensor] = []
        for update, down, up, low in zip(ctx.updates, saved[::3], saved[1::3], saved[2::3], strict=True):
            span = slice(update.span.start, update.span.stop)
            rows, dout = x[span], gradients[0][span].to(down.dtype)
            mask, through = update.mask(rows), (dout @ up).mul_(update.scaling)
            if dx is not None and mask is None:
                _add_product(dx[span], through, down)
            elif dx is not None:
                dx[span] += (through @ down).mul_(mask)
            rows = (rows if mask is None else rows * mask).to(down.dtype)
            factors += [(through.t() @ rows).float(), _outer(dout, low)]
        return dx, None, None, None, *factors


def _add_product(into: Tensor, one: Tensor, other: Tensor) -> None:
    """Add a product, in float32 or the dtype of `into`, and round the sum once."""
    if into.dtype == one.dtype:
        into.addmm_(one, other)
    else:
        into.copy_(into.float().addmm_(one, other))


def _outer(gradient: Tensor, low: Tensor) -> Tensor:
    """Return gradient^T low, [out, rank], in float32."""
    if low.dtype == torch.float32:
        return gradient.t() @ low
    # oneDNN is slow with a long transposed factor; transposing the small result costs no more than rounding it.
    return (low.t() @ gradient).t().to(torch.float32, memory_format=torch.contiguous_format)
