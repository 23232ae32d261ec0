"""Report whether a measurement meets its budget."""

from __future__ import annotations


def budget(name: str, figure: float, limit: float, *, at_most: bool = False) -> None:
    """Print the line of one budget: figure, limit, and whether it is met."""
    met = figure <= limit if at_most else figure >= limit
    sign, verdict = "<=" if at_most else ">=", "met" if met else "missed"
    print(f"budget {name}: {figure:.4g} ({sign} {limit:.4g}) {verdict}", flush=True)
