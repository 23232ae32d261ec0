"""Report whether a measurement meets its budget, and the percentile that budgets are about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def budget(name: str, figure: float, limit: float, *, at_most: bool = False) -> None:
    """Print the line of one budget: figure, limit, and whether it is met."""
    met = figure <= limit if at_most else figure >= limit
    sign, verdict = "<=" if at_most else ">=", "met" if met else "missed"
    print(f"budget {name}: {figure:.4g} ({sign} {limit:.4g}) {verdict}", flush=True)


def p99(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return the 99th percentile; for few values, the largest."""
    return float(np.percentile(values, 99, method="higher"))
