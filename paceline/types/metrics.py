"""What was measured of a run: rows of values, the curves that they form, and rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np

from paceline.types.reprs import ShortRepr
from paceline.types.training import Array


class RowSource(Enum):
    """Who wrote a row. The values are those on the wire."""

    TRAINER = 1
    CLIENT = 2


@dataclass(frozen=True, slots=True, repr=False)
class MetricsRow(ShortRepr):
    """Values of one step."""

    number: int
    """Place among the run's rows, from 1. Numbers of rows that were dropped from a long run are missing."""
    step: int
    """Optimizer steps taken when they were measured."""
    time: datetime
    """When it was written, in UTC."""
    values: Mapping[str, float]
    """Values by name."""
    source: RowSource
    """Who measured them."""


class Metrics(Mapping[str, Array]):
    """The rows of a run as curves: a mapping from names to values, one for each of `steps`.

    Rows of the same step are joined, and later ones replace what earlier ones say, as after a checkpoint of an earlier
    step was loaded. A step without a value of that name has NaN. `pandas.DataFrame(dict(metrics), index=metrics.steps)`
    makes a table.
    """

    def __init__(self, rows: Sequence[MetricsRow]) -> None:
        self.rows = tuple(rows)
        """The rows, in order of their numbers."""
        joined: dict[int, dict[str, float]] = {}
        for row in self.rows:
            joined.setdefault(row.step, {}).update(row.values)
        self.steps: Array = np.array(sorted(joined), np.int64)
        """The steps that have a row, ascending: int64, shape [N]."""
        self._curves: dict[str, Array] = {}
        for place, step in enumerate(self.steps):
            for name, value in joined[int(step)].items():
                curve = self._curves.setdefault(name, np.full(len(self.steps), np.nan))
                curve[place] = value

    def __getitem__(self, name: str) -> Array:
        """Return the values of a name: float64, shape [N]. Raises KeyError, which names similar ones."""
        try:
            return self._curves[name]
        except KeyError:
            near = get_close_matches(str(name), self._curves, n=3, cutoff=0.5) or sorted(self._curves)
            raise KeyError(f"no step has {name!r}; there are {', '.join(near) or 'no values'}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._curves

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)

    def __repr__(self) -> str:
        if not self.rows:
            return "<Metrics without rows>"
        last = ", ".join(f"{name} {self._newest(name):.4g}" for name in sorted(self._curves))
        return f"<Metrics of {len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]}; last: {last}>"

    def _newest(self, name: str) -> float:
        """Return the value of the newest row that has one."""
        return next(row.values[name] for row in reversed(self.rows) if name in row.values)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Rollout(ShortRepr):
    """A prompt, what was sampled after it, and how good that was. All its text has at most 65,536 bytes."""

    prompt: str = ""
    """Text of the prompt."""
    completion: str = ""
    """Text of the completion."""
    reward: float | None = None
    """Its reward."""
    extras: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Anything else by name, as text."""

    def __init__(self, prompt: str = "", completion: str = "", reward: float | None = None, **extras: Any) -> None:
        """Further arguments are kept by their names, as `str` shows them: at most 16, of 4,096 bytes each."""
        self._set(prompt, completion, reward, {name: str(value) for name, value in extras.items()})

    @classmethod
    def with_extras(cls, prompt: str, completion: str, reward: float | None, extras: Mapping[str, str]) -> Rollout:
        """Return a rollout with extras of any names."""
        rollout = cls()
        rollout._set(prompt, completion, reward, dict(extras))
        return rollout

    def _set(self, prompt: str, completion: str, reward: float | None, extras: Mapping[str, str]) -> None:
        for name, value in (("prompt", prompt), ("completion", completion), ("reward", reward), ("extras", extras)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, repr=False)
class RolloutRow(ShortRepr):
    """A rollout that was logged."""

    number: int
    """Place among the run's rollouts, from 1."""
    step: int
    """Optimizer steps taken when it was logged, or those that its client named."""
    time: datetime
    """When it was logged, in UTC."""
    rollout: Rollout
    """What was logged."""
