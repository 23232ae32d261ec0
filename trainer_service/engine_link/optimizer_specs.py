"""The optimizers and the ranges of their settings. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import OutOfRange
from paceline.types.optimizers import OPTIMIZERS, OptimizerParams, optimizer_name

_SMALLEST_EPS = 1e-30
"""A divisor must not be 0 in float32, or a weight with a gradient of 0 would become NaN."""


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a setting accepts: low <= value <= high."""

    low: float = 0.0
    high: float = math.inf
    high_open: bool = False
    or_zero: bool = False
    """Whether 0 is also accepted; it turns the setting off."""

    def holds(self, value: float) -> bool:
        """Return whether a value is finite and in the range."""
        inside = self.low <= value < self.high if self.high_open else self.low <= value <= self.high
        return math.isfinite(value) and (inside or (self.or_zero and value == 0))

    def __str__(self) -> str:
        top = "" if math.isinf(self.high) else f" and {'below' if self.high_open else 'at most'} {self.high:g}"
        return f"{'0 or ' if self.or_zero else ''}at least {self.low:g}{top}"


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The settings of an optimizer."""

    name: str
    ranges: Mapping[str, Range]
    """Range of each numeric setting."""
    fixed: tuple[str, ...] = ()
    """Settings that the optimizer's state depends on; they cannot change while it exists."""

    def check(self, params: OptimizerParams) -> None:
        """Check settings. Raises OutOfRange naming the setting."""
        for setting, bounds in self.ranges.items():
            value = getattr(params, setting)
            if not bounds.holds(value):
                raise OutOfRange(f"is {value:g}; must be {bounds}", field=f"{self.name}.{setting}")

    def changed(self, before: OptimizerParams, after: OptimizerParams) -> str:
        """Name the first fixed setting that differs between two steps; empty if none does."""
        return next((name for name in self.fixed if getattr(before, name) != getattr(after, name)), "")


_POSITIVE = Range(1)
_COMMON = {"learning_rate": Range(), "weight_decay": Range(), "grad_clip_norm": Range()}
_ADAM = {
    **_COMMON,
    "beta1": Range(high=1.0, high_open=True),
    "beta2": Range(high=1.0, high_open=True),
    "eps": Range(_SMALLEST_EPS),
}
_ADAFACTOR = {
    **_COMMON,
    "decay_exponent": Range(high=1.0),
    "eps1": Range(_SMALLEST_EPS),
    "eps2": Range(),
    "clip_threshold": Range(),
}
_APOLLO = {
    **_ADAM,
    "scale": Range(),
    "update_interval": _POSITIVE,
    "norm_growth_limit": Range(1.0, or_zero=True),
    "seed": Range(high=2.0**64, high_open=True),
}

OPTIMIZER_SPECS: Mapping[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec("adamw", _ADAM),
        OptimizerSpec("adamw_8bit", _ADAM),
        OptimizerSpec("adamw_cpu", _ADAM),
        OptimizerSpec("adafactor", _ADAFACTOR),
        OptimizerSpec("apollo", {**_APOLLO, "rank": _POSITIVE}, fixed=("rank", "seed")),
        OptimizerSpec("apollo_mini", _APOLLO, fixed=("seed",)),
    )
}
"""Every optimizer, by name."""


def spec_of(params: OptimizerParams) -> OptimizerSpec:
    """Return the spec of the optimizer that `params` belong to."""
    return OPTIMIZER_SPECS[optimizer_name(params)]


def settings_of(params: OptimizerParams) -> dict[str, Any]:
    """Return settings as plain values by name."""
    return asdict(params)


def make_params(name: str, settings: Mapping[str, Any]) -> OptimizerParams:
    """Make settings of the optimizer `name`; omitted ones keep their defaults. The inverse of `settings_of`."""
    return OPTIMIZERS[name](**settings)
