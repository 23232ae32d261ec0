"""A forward_backward in progress: segments that wait, results so far, and at the end the run's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paceline.types import Datum, ForwardBackwardOutput, ForwardBackwardSpec
from paceline.types.training import Array
from trainer_service.engine import messages
from trainer_service.engine.distributed.ranks import Ranks
from trainer_service.engine.loss.losses import LOSSES, TokenLoss
from trainer_service.engine.loss.non_finite import count_non_finite, refuse_non_finite
from trainer_service.engine.microbatch.packing import Batch, Pack, PackedSegment, scatter_logprobs
from trainer_service.engine.runs.run import EngineRun


class ForwardBackwardJob:
    """Implements `ForwardBackwardHandle` and `scheduler.Demand`. The run changes when the last segment is done."""

    def __init__(
        self,
        run: EngineRun,
        data: Sequence[Datum],
        batch: Batch,
        spec: ForwardBackwardSpec,
        *,
        alone: bool = False,
    ) -> None:
        """Start a job for a run. `batch` holds the same `data`; `spec` has the loss's resolved settings."""
        self.run, self.batch, self._spec, self.alone = run, batch, spec, alone
        self.error: Exception | None = None
        """The error that the job failed with; None if it has not failed."""
        self.seed: int | None = None
        """Seed of dropout; None if nothing is dropped."""
        self._rng_state = run.rng_state
        if run.uses_dropout and not spec.forward_only:
            self.seed, self._rng_state = run.draw_seed()
        self._groups = batch.segments()
        self._outputs = [np.zeros(datum.loss_inputs["target_tokens"].shape, np.float32) for datum in data]
        self._counted: set[int] = set()
        """Indices of the datums that this rank has computed."""
        self._totals = Totals()
        self._gradients: list[Tensor | None] = [None] * len(run.parameters)

    @property
    def forward_only(self) -> bool:
        return self._spec.forward_only

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def waiting(self) -> list[PackedSegment]:
        """Segments of the first unfinished group, longest first."""
        return next((group for group in self._groups if group), [])

    @property
    def is_done(self) -> bool:
        """Whether no segment waits, including because the job failed."""
        return self.error is not None or not self.waiting

    def output(self) -> ForwardBackwardOutput:
        if self.error is not None:
            raise self.error
        return ForwardBackwardOutput([{"logprobs": values} for values in self._outputs], self._totals.metrics())

    def loss(self, logprobs: Tensor, pack: Pack) -> TokenLoss:
        """Compute the weighted loss at a pack's counted positions."""
        result = LOSSES[self._spec.loss_fn](logprobs, pack.loss_inputs, self._spec.loss_fn_config)
        return TokenLoss(result.loss * pack.weights, result.means)

    def add(self, pack: Pack, logprobs: Array, totals: Totals, gradients: Sequence[Tensor | None]) -> None:
        """Add the results of a pass; `gradients` is empty if none are computed. Allocates nothing that can run out."""
        scatter_logprobs(self._outputs, pack, logprobs)
        self._counted.update(segment.index for segment in pack.segments)
        self._totals.join(totals)
        for place, gradient in enumerate(gradients):
            sum_so_far = self._gradients[place]
            if sum_so_far is None:
                self._gradients[place] = gradient
            elif gradient is not None:
                sum_so_far.add_(gradient)

    def pool(self, ranks: Ranks) -> None:
        """Combine the results of all ranks, so that each has all of them; all ranks call this together."""
        if ranks.size == 1:
            return
        own = {index: self._outputs[index] for index in self._counted}
        self._totals, mine = Totals(), self._totals
        for payload in ranks.gather(messages.encode(_RankShare(mine, own))):
            share = messages.decode(payload, _RankShare)
            self._totals.join(share.totals)
            for index, values in share.outputs.items():
                self._outputs[index] = values
        if not self.forward_only:
            shapes = list(self.run.parameters.values())
            self._gradients = [*ranks.total(self._gradients, shapes)]

    def finish(self) -> None:
        """Add the gradient of the finished job to the run's. Raises NonFiniteLoss if the spec asks for that."""
        if not self.forward_only:
            self._totals.elements = count_non_finite(self._gradients)
        if self._spec.refuse_non_finite:
            refuse_non_finite(self._totals.positions, self._totals.elements or 0)
        if not self.forward_only:
            self.run.add_gradient(self._gradients, self._totals.tokens)
            self.run.rng_state = self._rng_state
        self._gradients = []

    def fail(self, error: Exception) -> None:
        """End the job with an error and leave the run unchanged."""
        self.error = error
        self._groups, self._gradients = [], []


@dataclass(slots=True)
class Totals:
    """Sums over the packs of one request."""

    tokens: int = 0
    positions: int = 0
    """Positions where the loss is NaN or infinite."""
    elements: int | None = None
    """Elements of the gradient that are NaN or infinite; None until the gradient is complete."""
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, token_loss: TokenLoss) -> Totals:
        """Sum over the positions of one pack."""
        loss = token_loss.loss.detach()
        positions = int(loss.isfinite().logical_not().sum())
        sums = {name: values.double().sum().item() for name, values in token_loss.means.items()}
        return cls(loss.numel(), positions, loss=loss.double().sum().item(), sums=sums)

    def join(self, other: Totals) -> None:
        """Add the sums of `other`."""
        self.tokens += other.tokens
        self.positions += other.positions
        self.loss += other.loss
        for name, total in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total

    def metrics(self) -> dict[str, float]:
        """Return metrics, named `name:reduction`. Means over no tokens are omitted."""
        means = {f"{name}:mean": total / self.tokens for name, total in self.sums.items()}
        non_finite = {"nonfinite:sum": float(self.positions)}
        if self.elements is not None:
            non_finite["nonfinite_gradient:sum"] = float(self.elements)
        return {"loss:sum": self.loss, "tokens:sum": float(self.tokens), **non_finite, **means}


@dataclass(frozen=True, slots=True)
class _RankShare:
    """One rank's results of a job."""

    totals: Totals
    outputs: dict[int, Array]
    """Index of a datum in the request -> its logprobs."""
