"""The passes whose gradient an optimizer step applies, as one."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan

from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types.reductions import merge_metrics

_OF_GRADIENTS = "nonfinite_gradient:sum"
"""Metric of a pass that has computed a gradient, which forward_only passes lack."""
_TOKENS, _LOSS = "tokens:sum", "loss:sum"


@dataclass(slots=True)
class Passes:
    """What passes replied, joined: sums add up, and means are weighted by the positions that they cover."""

    metrics: dict[str, float] = field(default_factory=dict)
    sequences: int = 0
    wait: float = 0.0
    """Milliseconds in which they waited for their turn in the engine; NaN if one was not measured."""
    forward_backward: float = 0.0
    """Milliseconds from their turn to their replies; NaN if one was not measured."""

    def add(self, reply: pb.ForwardBackwardResponse, *, wait: float = nan, forward_backward: float = nan) -> None:
        """Add a pass that has computed a gradient."""
        one = Passes(dict(reply.metrics), len(reply.outputs), wait, forward_backward)
        self.join(one)

    def join(self, other: Passes) -> None:
        """Add other passes."""
        self.metrics = merge_metrics([metrics for metrics in (self.metrics, other.metrics) if metrics] or [{}])
        self.sequences += other.sequences
        self.wait += other.wait
        self.forward_backward += other.forward_backward

    def values(self) -> dict[str, float]:
        """Return the values of a row, by name, except times."""
        if not self.sequences:
            return {}
        found = {**self.metrics, "sequences": float(self.sequences)}
        if tokens := self.metrics.get(_TOKENS):
            found["loss:mean"] = self.metrics[_LOSS] / tokens
        return found


def adds_gradient(reply: pb.ForwardBackwardResponse) -> bool:
    """Return whether a pass has added to the run's gradient."""
    return _OF_GRADIENTS in reply.metrics
