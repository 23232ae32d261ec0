"""Print the measurements of `python -m bench.train` as a table, with the budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.budgets import budget
from bench.train.batches import Model
from bench.train.cases import Case

OURS = "paceline bfloat16"
FLOP_PER_WEIGHT = 4
"""Per token and frozen weight: a multiply-add for the output (forward) and one for the input's gradient (backward)."""


@dataclass
class Figures:
    """Measurements of one model."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    product_rates: list[float] = field(default_factory=list)
    way_seconds: list[float] = field(default_factory=list)

    def add(self, arm: str, seconds: float, peak: float) -> None:
        """Record one round of an arm."""
        self.seconds.setdefault(arm, []).append(seconds)
        self.peaks[arm] = max(peak, self.peaks.get(arm, 0.0))

    def speed(self, arm: str) -> np.ndarray[Any, Any]:
        """Return tokens per second in each round, without padding."""
        return np.divide(self.tokens, self.seconds[arm])

    def share(self, arm: str, model: Model) -> float:
        """Return the median speed of an arm as a share of the median rate of square products."""
        rate = float(np.median(self.product_rates))
        return float(FLOP_PER_WEIGHT * model.parameters * np.median(self.speed(arm)) / rate)


def report(model: Model, figures: Figures, case: Case) -> None:
    """Print the table and the budgets of one model: speed against other arms, share of the products' rate, RPC."""
    rate, ours = float(np.median(figures.product_rates)), figures.speed(OURS)
    print(f"\n{model.name}: {model.parameters / 1e6:.0f} M parameters, bfloat16 products {rate / 1e9:.0f} GFLOP/s")
    print(f"{len(figures.tokens)} rounds of {min(figures.tokens)} to {max(figures.tokens)} tokens")
    print(f"{'arm':48}{'tokens/s':>9}{'s median':>10}{'s p99':>8}{'peak MiB':>10}{'of GEMM':>9}{'ours':>7}")
    for arm, seconds in figures.seconds.items():
        speed = figures.speed(arm)
        print(f"{arm:48}{np.median(speed):9.0f}{np.median(seconds):10.2f}{np.percentile(seconds, 99):8.2f}"
              f"{figures.peaks[arm] / 2**20:10.0f}{figures.share(arm, model):9.0%}"
              f"{np.median(ours / speed):6.1f}x")  # fmt: skip
    for arm, times in case.times_faster.items():
        if arm in figures.seconds:
            budget(f"{model.name} against {arm}", float(np.median(ours / figures.speed(arm))), times)
    if case.least_share is not None:
        budget(f"{model.name} share of the bfloat16 GEMM rate", figures.share(OURS, model), case.least_share)
    if case.least_tokens is not None:
        budget(f"{model.name} tokens/s", float(np.median(ours)), case.least_tokens)
    way = np.asarray(figures.way_seconds) / np.asarray(figures.seconds[OURS])
    budget(f"{model.name} share of RPC and serialisation", float(np.median(way)), 0.02, at_most=True)
