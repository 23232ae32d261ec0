"""Whether runs compute what stock transformers computes: measured at every load, before a model is served."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.errors import OutOfMemory, Unsupported
from paceline.types.training import Array
from trainer_service.engine.certificate.stock import Stock, Weights, apart, rms
from trainer_service.engine.model.pass_mode import PassMode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Results:
    """What the engine gives for a probe."""

    logprobs: dict[str, list[Array]]
    """Run -> log-probabilities of each sequence, computed beside the other run's."""
    gradients: dict[str, Weights]
    alone: Array
    """Log-probabilities of the first run's last sequence, computed by itself, without gradients."""


@dataclass(frozen=True, slots=True)
class Differences:
    """How far results are from those of stock transformers."""

    logprob: float
    gradient: float
    typical: float
    """Median of the differences between log-probabilities."""

    @classmethod
    def between(cls, results: Results, stock: Stock) -> Differences:
        """Compare all that there is."""
        off = [results.alone - next(iter(stock.logprobs.values()))[-1]]
        for run, sequences in stock.logprobs.items():
            off += [own - theirs for own, theirs in zip(results.logprobs[run], sequences, strict=True)]
        names = [(run, name) for run, weights in stock.gradients.items() for name in weights]
        theirs = [stock.gradients[run][name] for run, name in names]
        gradient = apart(theirs, [results.gradients[run][name] for run, name in names])
        return cls(rms(*off), gradient, float(np.median(np.abs(np.concatenate(off)))))

    def within(self, stock: Stock) -> bool:
        """Whether rounding explains them; NaN it never does."""
        return self.logprob <= stock.logprob_bound and self.gradient <= stock.gradient_bound

    def of_few(self, stock: Stock) -> bool:
        """Whether most tokens are as they should be and a few are not, as where rounding chose another expert."""
        return not self.within(stock) and self.typical <= stock.logprob_bound

    def __str__(self) -> str:
        return f"log-probabilities differ by {self.logprob:.2g}, gradients by {self.gradient:.2g}"


class Candidate(Protocol):
    """An engine that is not certified yet."""

    def use(self, mode: PassMode) -> None:
        """Compute passes by a mode from now on. Raises Unsupported for what the model does not take."""
        ...

    def mixes(self, mode: PassMode) -> bool:
        """Tell whether a sequence depends on those before it in its pass."""
        ...

    def compute(self, stock: Stock) -> Results:
        """Compute the probe of which `stock` is what transformers gives, with its adapters."""
        ...

    def explain(self, mode: PassMode, error: Exception | None) -> str:
        """Say in a sentence what a mode gets wrong, and in which module; `error` is what it failed of, if it did."""
        ...


class InDoubtError(Exception):
    """A few tokens differ, which other tokens would show to be chance or not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The mode that an engine uses from now on."""

    mode: PassMode
    differences: Differences
    reason: str
    """Why sequences do not share passes; empty where they do."""


def certify(engine: Candidate, modes: Sequence[PassMode], stock: Stock, name: str, *, last: bool) -> Verdict:
    """Let the engine use the first of `modes` in which it computes what stock transformers computes.

    Raises Unsupported, with a sentence that names a module, where there is none; unless this is the `last` probe,
    InDoubtError where a mode may have failed by chance.
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
    """Return how far a mode is from stock transformers, None without results, and why it is not taken, if it is not."""
    try:
        engine.use(mode)
        if mode.is_packed and engine.mixes(mode):
            return None, engine.explain(mode, None)
        differences = Differences.between(engine.compute(stock), stock)
    except OutOfMemory:
        raise  # Of the machine, not of the mode.
    except Exception as error:
        return None, engine.explain(mode, error)
    return differences, "" if differences.within(stock) else engine.explain(mode, None)
