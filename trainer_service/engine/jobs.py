"""A forward_backward on its way through passes: what waits, what has come, and the run's gradient at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.types import Datum, ForwardBackwardOutput
from paceline.types.training import Array
from trainer_service.engine.losses import LOSSES, TokenLoss
from trainer_service.engine.packing import Batch, Pack, Segment, scatter_logprobs
from trainer_service.engine.run import EngineRun


@dataclass(frozen=True, slots=True)
class Measured:
    """What a pass gave one job, as numbers on the host and gradients."""

    pack: Pack
    logprobs: Array
    """float32, [K] or [K, M] at the pack's counted positions."""
    loss: float
    sums: dict[str, float]
    """Of the loss's statistics over the counted positions."""
    gradients: Sequence[Tensor | None]
    """One for each of the run's weights; none at all where no gradient is computed."""

    @classmethod
    def of(cls, pack: Pack, logprobs: Tensor, loss: TokenLoss, gradients: Sequence[Tensor | None]) -> Measured:
        """Read what a pass computed."""
        sums = {name: values.double().sum().item() for name, values in loss.means.items()}
        return cls(pack, logprobs.detach().cpu().numpy(), loss.loss.detach().double().sum().item(), sums, gradients)


class Job:
    """Fulfils `base.Job` and `scheduler.Demand`. The run is left as it was until the last segment is done."""

    def __init__(
        self,
        run: EngineRun,
        data: Sequence[Datum],
        batch: Batch,
        loss_fn: str,
        config: Mapping[str, float],
        *,
        forward_only: bool,
        alone: bool,
    ) -> None:
        """Take a run's data, the same as a batch, and the name and resolved settings of a loss."""
        self.run, self.batch, self.forward_only, self.alone = run, batch, forward_only, alone
        self.error: Exception | None = None
        """What it failed of."""
        self.seed: int | None = None
        """What dropout is drawn from."""
        self._rng_state = run.rng_state
        if run.lora.dropout and not forward_only:
            self.seed, self._rng_state = run.draw_seed()
        self._groups = batch.segments()
        self._loss_fn, self._config = loss_fn, config
        self._outputs = [np.full(datum.loss_inputs["target_tokens"].shape, np.nan, np.float32) for datum in data]
        self._totals = _Totals()
        self._gradients: list[Tensor | None] = [None] * len(run.parameters)

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def waiting(self) -> list[Segment]:
        """Segments of the group whose turn it is, longest first."""
        return next((group for group in self._groups if group), [])

    @property
    def is_done(self) -> bool:
        """Whether nothing of it waits, be it that it failed."""
        return self.error is not None or not self.waiting

    def output(self) -> ForwardBackwardOutput:
        if self.error is not None:
            raise self.error
        return ForwardBackwardOutput([{"logprobs": values} for values in self._outputs], self._totals.metrics())

    def loss(self, logprobs: Tensor, pack: Pack) -> TokenLoss:
        """Compute the weighted loss at a pack's counted positions."""
        result = LOSSES[self._loss_fn](logprobs, pack.loss_inputs, self._config)
        return TokenLoss(result.loss * pack.weights, result.means)

    def add(self, measured: Measured) -> None:
        """Take in what a pass gave. Allocates nothing."""
        scatter_logprobs(self._outputs, measured.pack, measured.logprobs)
        self._totals.add(measured)
        for place, gradient in enumerate(measured.gradients):
            sum_so_far = self._gradients[place]
            if sum_so_far is None:
                self._gradients[place] = gradient
            elif gradient is not None:
                sum_so_far.add_(gradient)

    def finish(self) -> None:
        """Add the gradient to the run's, once everything is done."""
        if not self.forward_only:
            self.run.add_gradient(self._gradients, self._totals.tokens)
            self.run.rng_state = self._rng_state
        self._gradients = []

    def fail(self, error: Exception) -> None:
        """End it with an error, the run as it was."""
        self.error = error
        self._groups, self._gradients = [], []


class _Totals:
    """Sums over the packs of one request."""

    def __init__(self) -> None:
        self.tokens = 0
        self._loss = 0.0
        self._sums: dict[str, float] = {}

    def add(self, measured: Measured) -> None:
        self.tokens += len(measured.logprobs)
        self._loss += measured.loss
        for name, value in measured.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Named name:reduction. Means over no tokens are left out."""
        means = {f"{name}:mean": total / self.tokens for name, total in self._sums.items()}
        return {"loss:sum": self._loss, "tokens:sum": float(self.tokens), **means}
