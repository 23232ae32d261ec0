"""Metrics of several passes as those of one, by the reductions that their names end in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline import errors
from paceline.types.training import ADVANTAGE_MEANS, ADVANTAGE_TOKENS


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the metrics of a batch's parts by their name's suffix: sum, min, max, or mean.

    A mean is weighted by the positions that it covers: `tokens:sum`, or `advantage_tokens:sum` for `ADVANTAGE_MEANS`.
    Raises Internal for any other reduction if there are several parts.
    """
    if len(parts) == 1:
        return dict(parts[0])
    return {name: _reduce(name, parts) for name in dict.fromkeys(name for part in parts for name in part)}


def _reduce(name: str, parts: Sequence[Mapping[str, float]]) -> float:
    present = [part for part in parts if name in part]
    values = [part[name] for part in present]
    match name.rpartition(":")[2]:
        case "sum":
            return sum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "mean":
            positions = ADVANTAGE_TOKENS if name in ADVANTAGE_MEANS else "tokens:sum"
            weights = [part.get(positions, 0.0) for part in present]
            weighted = sum(weight * value for weight, value in zip(weights, values, strict=True) if weight)
            return weighted / (sum(weights) or 1.0)
        case reduction:
            raise errors.Internal(f"reduction {reduction} is unknown; parts cannot be merged", field=f"metrics[{name}]")
