"""Measure at every load, before a model is served, whether runs compute what stock transformers computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.errors import OutOfMemory, Unsupported
from paceline.types.training import Array
from trainer_service.engine.certificate.stock import Stock, Weights, apart, rms
from trainer_service.engine.model.base_model import PassMode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Results:
    """What the engine computes for a probe."""

    logprobs: dict[str, list[Array]]
    """Run -> log-probabilities of each sequence, computed alongside the other run's."""
    gradients: dict[str, Weights]
    alone: Array
    """Log-probabilities of the first run's last sequence, computed on its own and without gradients."""


@dataclass(frozen=True, slots=True)
class Differences:
    """How far results differ from those of stock transformers."""

    logprob: float
    gradient: float
    typical: float
    """Median absolute difference between log-probabilities."""

    @classmethod
    def between(cls, results: Results, stock: Stock) -> Differences:
        """Compare all log-probabilities and gradients."""
        off = [results.alone - next(iter(stock.logprobs.values()))[-1]]
        for run, sequences in stock.logprobs.items():
            off += [own - theirs for own, theirs in zip(results.logprobs[run], sequences, strict=True)]
        names = [(run, name) for run, weights in stock.gradients.items() for name in weights]
        theirs = [stock.gradients[run][name] for run, name in names]
        gradient = apart(theirs, [results.gradients[run][name] for run, name in names])
        return cls(rms(*off), gradient, float(np.median(np.abs(np.concatenate(off)))))

    def within(self, stock: Stock) -> bool:
        """Return whether rounding explains the differences. It never explains NaN."""
        return self.logprob <= stock.logprob_bound and self.gradient <= stock.gradient_bound

    def of_few(self, stock: Stock) -> bool:
        """Return whether most tokens match and a few do not, as happens when rounding selects another expert."""
        return not self.within(stock) and self.typical <= stock.logprob_bound

    def __str__(self) -> str:
        return f"log-probabilities differ by {self.logprob:.2g}, gradients by {self.gradient:.2g}"


class Candidate(Protocol):
    """An engine that is not certified yet."""

    def use(self, mode: PassMode) -> None:
        """Switch to a mode for all later passes. Raises Unsupported if the model does not support it."""
        ...

    def mixes(self, mode: PassMode) -> bool:
        """Return whether a sequence depends on earlier sequences in its pass."""
        ...

    def compute(self, stock: Stock) -> Results:
        """Compute the probe that `stock` was measured with, using the adapters in `stock`."""
        ...

    def explain(self, mode: PassMode, error: Exception | None) -> str:
        """Say in a sentence what a mode gets wrong, and in which module. `error` is what it raised, if anything."""
        ...


class InDoubtError(Exception):
    """A few tokens differ; only other tokens can show whether that is chance."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The mode that an engine was certified in."""

    mode: PassMode
    differences: Differences
    reason: str
    """Why sequences do not share passes; empty if they do."""


def certify(engine: Candidate, modes: Sequence[PassMode], stock: Stock, name: str, *, last: bool) -> Verdict:
    """Switch the engine to the first of `modes` in which it computes what stock transformers computes.

    Raises Unsupported, with a sentence that names a module, if there is none. Unless this is the `last` probe, raises
    InDoubtError if a mode may have failed by chance.
    """
    reason = packing = ""
    for mode in modes:
        differences, reason = _try(engine, mode, stock)
        if differences is not None and not reason:
            return Verdict(mode, differences, "" if mode.is_packed else packing)
        _log.info("%s does not go with %s: %s (%s).", name, mode, reason, differences or "no results")
        if differences is not None and differences.of_few(stock) and not last:
            raise InDoubtError
        if mode.is_packed:
            packing = f"{reason}."
    raise Unsupported(f"{name} cannot be served: {reason}.")


def _try(engine: Candidate, mode: PassMode, stock: Stock) -> tuple[Differences | None, str]:
    """Return how far a mode is from stock transformers (None without results), and why it is rejected, if it is."""
    try:
        engine.use(mode)
        if mode.is_packed and engine.mixes(mode):
            return None, engine.explain(mode, None)
        differences = Differences.between(engine.compute(stock), stock)
    except OutOfMemory:
        raise  # The machine's fault, not the mode's.
    except Exception as error:
        return None, engine.explain(mode, error)
    return differences, "" if differences.within(stock) else engine.explain(mode, None)
