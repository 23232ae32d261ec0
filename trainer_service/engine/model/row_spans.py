"""Which rows of a pass belong to which run: set once per pass by the engine, read by every adapted layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor


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

    @property
    def rows(self) -> slice:
        """The rows as a slice."""
        return slice(self.start, self.stop)

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
