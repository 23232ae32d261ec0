"""A forward_backward in progress: its datums, packed without padding, results so far, and at the end a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from paceline.errors import NonFiniteLoss
from paceline.types import Datum, ForwardBackwardSpec, Reduction
from paceline.types.training import ADVANTAGE_TOKENS, Array
from trainer_service.engine.distributed.ranks import Ranks
from trainer_service.engine.loss.losses import SEQUENCE_LENGTHS
from trainer_service.engine.runs.run import EngineRun
from trainer_service.engine_link import messages
from trainer_service.engine_link.loss_specs import MASK, resolve_loss
from trainer_service.engine_link.protocol import AccumulatedOutput


class ForwardBackwardJob:
    """Implements `ForwardBackwardHandle` and `scheduler.Demand`. The run changes when the last segment is done."""

    def __init__(
        self, run: EngineRun, data: Sequence[Datum], spec: ForwardBackwardSpec, *, alone: bool = False
    ) -> None:
        """Start a job for a run. Raises UnknownLoss and whatever else `resolve_loss` raises."""
        loss = resolve_loss(spec.loss_fn, spec.loss_fn_config)
        self.run, self.run_id = run, run.run_id
        self.spec = replace(spec, loss_fn_config=loss.config)
        self.forward_only, self.alone = spec.forward_only, alone
        self.error: Exception | None = None
        """The error that the job failed with; None if it has not failed."""
        self.seed: int | None = None
        """Seed of dropout; None if nothing is dropped."""
        self._rng_state = run.rng_state
        if run.uses_dropout and not spec.forward_only:
            self.seed, self._rng_state = run.draw_seed()
        weights = datum_weights(data, spec.reduction, spec.reduction_count)
        self.batch = Datums(data, loss.required, defaults=loss.defaults, weights=weights)
        self.waiting = self.batch.segments()
        """Segments to compute; empty when the job is done, including because it failed."""
        self._outputs = [np.zeros(datum.loss_fn_inputs["target_tokens"].shape, np.float32) for datum in data]
        self._counted: set[int] = set()
        """Indices of the datums that this rank has computed."""
        self._totals = Totals()
        self._gradients: list[Tensor | None] = [None] * len(run.parameters)

    def output(self) -> AccumulatedOutput:
        if self.error is not None:
            raise self.error
        outputs = [{"logprobs": values} for values in self._outputs]
        return AccumulatedOutput(outputs, self._totals.metrics(), self.run.pending_tokens)

    def add(self, pack: Pack, logprobs: Array, totals: Totals, gradients: Sequence[Tensor | None]) -> None:
        """Add the results of a pass; `gradients` is empty if none are computed. Allocates no memory."""
        scatter_logprobs(self._outputs, pack, logprobs)
        self._counted.update(segment.index for segment in pack.segments)
        self._totals.add(totals)
        for index, gradient in enumerate(gradients):
            sum_so_far = self._gradients[index]
            if sum_so_far is None:
                self._gradients[index] = gradient
            elif gradient is not None:
                sum_so_far.add_(gradient)

    def combine_ranks(self, ranks: Ranks) -> None:
        """Combine the results of several ranks, so that each has all of them; all ranks call this together."""
        own = {index: self._outputs[index] for index in self._counted}
        self._totals, mine = Totals(), self._totals
        for payload in ranks.gather(messages.encode(_RankShare(mine, own))):
            share = messages.decode(payload, _RankShare)
            self._totals.add(share.totals)
            for index, values in share.outputs.items():
                self._outputs[index] = values
        if not self.forward_only:
            self._gradients = [*ranks.total(self._gradients, list(self.run.parameters.values()))]

    def finish(self) -> None:
        """Add the gradient of the finished job to the run's. Raises NonFiniteLoss with `refuse_non_finite`."""
        if not self.forward_only:
            self._totals.non_finite_elements = _count_non_finite(self._gradients)
        if self.spec.refuse_non_finite:
            self._totals.refuse_non_finite()
        if not self.forward_only:
            self.run.add_gradient(self._gradients, self._totals.tokens)
            self.run.rng_state = self._rng_state
        self._gradients = []

    def fail(self, error: Exception) -> None:
        """End the job with an error and leave the run unchanged."""
        self.error = error
        self.waiting, self._gradients = [], []


@dataclass(slots=True)
class Totals:
    """Sums over the packs of one request."""

    tokens: int = 0
    non_finite_positions: int = 0
    """Positions where the loss is NaN or infinite."""
    non_finite_elements: int | None = None
    """Elements of the gradient that are NaN or infinite; None until the gradient is complete."""
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """Statistic -> its sum over `tokens`."""
    with_advantage: int = 0
    """Positions whose advantage is not 0."""
    advantage_sums: dict[str, float] = field(default_factory=dict)
    """Statistic -> its sum over `with_advantage`."""

    def add(self, other: Totals) -> None:
        """Add the sums of `other`."""
        self.tokens += other.tokens
        self.non_finite_positions += other.non_finite_positions
        self.loss += other.loss
        self.with_advantage += other.with_advantage
        for mine, theirs in ((self.sums, other.sums), (self.advantage_sums, other.advantage_sums)):
            for name, total in theirs.items():
                mine[name] = mine.get(name, 0.0) + total

    def refuse_non_finite(self) -> None:
        """Raise NonFiniteLoss if the loss at any position, or any element of the gradient, is NaN or infinite."""
        positions, elements = self.non_finite_positions, self.non_finite_elements or 0
        if positions or elements:
            raise NonFiniteLoss(
                f"the loss is NaN or infinite at {positions} positions, its gradient in {elements} elements; "
                "nothing was added: look at the batch's log-probabilities, advantages and weights, and mask positions "
                "that hold placeholders.",
                metadata={"positions": str(positions), "gradient_elements": str(elements)},
            )

    def metrics(self) -> dict[str, float]:
        """Return metrics, named `name:reduction`. Means over no tokens are omitted."""
        means = {f"{name}:mean": total / self.tokens for name, total in self.sums.items()}
        if self.advantage_sums:
            means[ADVANTAGE_TOKENS] = float(self.with_advantage)
        if self.with_advantage:
            means |= {f"{name}:mean": total / self.with_advantage for name, total in self.advantage_sums.items()}
        non_finite = {"nonfinite:sum": float(self.non_finite_positions)}
        if self.non_finite_elements is not None:
            non_finite["nonfinite_gradient:sum"] = float(self.non_finite_elements)
        return {"loss:sum": self.loss, "tokens:sum": float(self.tokens), **non_finite, **means}


@dataclass(frozen=True, slots=True)
class _RankShare:
    """One rank's results of a job."""

    totals: Totals
    outputs: dict[int, Array]
    """Index of a datum in the request -> its logprobs."""


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """The part of a datum that a forward pass reads."""

    index: int
    """Index of the datum in the request."""
    length: int
    """Tokens up to the last counted position; later ones have no influence because attention is causal."""
    counted: Array
    """int64, shape [k]: counted positions, ascending."""


@dataclass(frozen=True, slots=True)
class Pack:
    """The input of one forward pass over T tokens, K of them counted."""

    segments: tuple[PackedSegment, ...]
    segment_lengths: tuple[int, ...]
    """Tokens of each segment."""
    input_ids: Tensor
    """int64, shape [1, T]."""
    position_ids: Tensor
    """int64, shape [1, T]; restarts at 0 with each segment."""
    counted: Tensor
    """int64, shape [K]: counted positions within the pack."""
    loss_fn_inputs: dict[str, Tensor]
    """shape [K] each, or [K, M] for M targets per position; target_tokens is int64, the rest float32.

    Also holds `SEQUENCE_LENGTHS`, int64, one for each segment.
    """
    weights: Tensor
    """float32, shape [K]: each position's loss is multiplied by this, its datum's weight in the batch."""


class Datums:
    """The datums of a request, read a pass at a time."""

    def __init__(
        self,
        data: Sequence[Datum],
        input_names: Iterable[str],
        *,
        defaults: Mapping[str, float] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Create a batch of datums with the named loss inputs.

        `defaults` maps further inputs to their values for datums that lack them; an input that no datum has is omitted.
        `weights` multiply the losses of each datum; the default is 1 for all.
        """
        self._data = data
        self._defaults = defaults or {}
        self._weights = weights or [1.0] * len(data)
        optional = (name for name in self._defaults if any(name in datum.loss_fn_inputs for datum in data))
        self._names = (*input_names, *optional)

    def segments(self) -> list[list[PackedSegment]]:
        """Return the segments, longest first, in groups with equal numbers of targets per position.

        A pack holds segments of one group, so that its targets form one array. Datums without counted positions are
        omitted.
        """
        groups: dict[tuple[int, ...], list[PackedSegment]] = {}
        for index, datum in enumerate(self._data):
            segment = segment_of(index, datum)
            if segment.length:
                groups.setdefault(datum.loss_fn_inputs["target_tokens"].shape[1:], []).append(segment)
        return [sorted(group, key=lambda segment: -segment.length) for group in groups.values()]

    def pack(self, segments: Sequence[PackedSegment], device: torch.device) -> Pack:
        """Pack segments into one row, on `device`."""
        lengths = tuple(segment.length for segment in segments)
        tokens = np.concatenate([self._data[s.index].model_input[: s.length] for s in segments])
        positions = np.concatenate([np.arange(length) for length in lengths])
        starts = accumulate(lengths, initial=0)
        counted = np.concatenate([s.counted + start for s, start in zip(segments, starts, strict=False)])
        weights = np.concatenate([_full(s, self._weights[s.index]) for s in segments])
        return Pack(
            tuple(segments),
            lengths,
            torch.from_numpy(tokens.astype(np.int64)).to(device)[None],
            torch.from_numpy(positions.astype(np.int64)).to(device)[None],
            torch.from_numpy(counted).to(device),
            {name: values.to(device) for name, values in self._inputs(segments).items()},
            torch.from_numpy(weights).to(device),
        )

    def _inputs(self, segments: Sequence[PackedSegment]) -> dict[str, Tensor]:
        """Return each input at the segments' counted positions, and the number of counted positions per segment."""
        inputs = {SEQUENCE_LENGTHS: torch.tensor([len(segment.counted) for segment in segments])}
        for name in self._names:
            values = np.concatenate([self._values(segment, name) for segment in segments])
            inputs[name] = torch.from_numpy(values.astype(np.int64 if name == "target_tokens" else np.float32))
        return inputs

    def _values(self, segment: PackedSegment, name: str) -> Array:
        values = self._data[segment.index].loss_fn_inputs.get(name)
        return _full(segment, self._defaults[name]) if values is None else values[segment.counted]


def segment_of(index: int, datum: Datum) -> PackedSegment:
    """Find the counted positions of a datum: those where the mask is not 0, or all without a mask."""
    mask = datum.loss_fn_inputs.get(MASK)
    counted = np.arange(len(datum.model_input)) if mask is None else np.flatnonzero(mask)
    return PackedSegment(index, int(counted[-1]) + 1 if len(counted) else 0, counted)


def datum_weights(data: Sequence[Datum], reduction: Reduction, count: int | None) -> list[float]:
    """Return the weight of each datum's losses that makes their weighted sum the reduced loss.

    `count` is the divisor of the whole batch, of which `data` may be a part; None means that `data` is the whole batch.
    """
    divisor = max(1, reduction.count(data) if count is None else count)
    if reduction is not Reduction.SEQUENCE_MEAN:
        return [1.0 / divisor] * len(data)
    return [1.0 / (divisor * max(1, datum.counted_positions)) for datum in data]


def scatter_logprobs(outputs: Sequence[Array], pack: Pack, logprobs: Array) -> None:
    """Write a pack's logprobs, shape [K] or [K, M], to the counted positions of `outputs`, one array per datum."""
    ends = list(accumulate(len(segment.counted) for segment in pack.segments))
    for segment, values in zip(pack.segments, np.split(logprobs, ends[:-1]), strict=True):
        outputs[segment.index][segment.counted] = values


def _count_non_finite(gradients: Sequence[Tensor | None]) -> int:
    """Count the elements that are NaN or infinite."""
    present = [gradient for gradient in gradients if gradient is not None]
    # The norm takes one pass over the gradients and usually suffices.
    if not present or math.isfinite(get_total_norm(present).item()):
        return 0
    return sum(int(gradient.isfinite().logical_not().sum()) for gradient in present)


def _full(segment: PackedSegment, value: float) -> Array:
    return np.full(len(segment.counted), value, np.float32)
