"""Ragged datums side by side in one row: no padding, a fixed budget of tokens for each forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.types import Datum, Reduction
from paceline.types.training import Array
from trainer_service.engine.loss_specs import MASK
from trainer_service.engine.losses import SEQUENCE_LENGTHS


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a datum that a forward pass reads."""

    index: int
    """Place of the datum in the request."""
    length: int
    """Tokens up to the last counted position; later ones influence nothing, as attention is causal."""
    counted: Array
    """int64, shape [k]: positions that count, ascending."""


@dataclass(frozen=True, slots=True)
class Pack:
    """The input of one forward pass over T tokens, K of them counted."""

    segments: tuple[Segment, ...]
    input_ids: Tensor
    """int64, shape [1, T]."""
    position_ids: Tensor
    """int64, shape [1, T]; restarts at 0 with each segment."""
    counted: Tensor
    """int64, shape [K]: counted positions within the pack."""
    loss_inputs: dict[str, Tensor]
    """shape [K] each, [K, M] for M targets per position; target_tokens is int64, the rest float32.

    And `SEQUENCE_LENGTHS`, int64, one for each segment.
    """
    weights: Tensor
    """float32, shape [K]: what each position's loss is multiplied by, its datum's weight in the batch."""

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment, in order."""
        return tuple(segment.length for segment in self.segments)


def segment_of(index: int, datum: Datum) -> Segment:
    """Find the counted positions of a datum: those with mask 1, or all without a mask."""
    mask = datum.loss_inputs.get(MASK)
    counted = np.arange(len(datum.model_input)) if mask is None else np.flatnonzero(mask)
    return Segment(index, int(counted[-1]) + 1 if len(counted) else 0, counted)


def plan_packs(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequences into packs of at most `budget` tokens, first fit by decreasing length; a longer one is alone.

    Returns indices into `lengths`. Sequences of length 0 are in no pack.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        length = lengths[index]
        fit = next((p for p, free in enumerate(room) if free >= length), None)
        if fit is None:
            packs.append([])
            room.append(budget)
            fit = len(packs) - 1
        packs[fit].append(index)
        room[fit] -= length
    return packs


def plan_rounds(lengths: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """Group sequences into packs as `plan_packs` does, a multiple of `ranks` of them and alike in size if they can be.

    Packs [0, ranks) run at the same time, then the next ones. For one rank the packs are those of `plan_packs`.
    """
    packs = plan_packs(lengths, budget)
    if ranks == 1 or not packs:
        return packs
    levelled: list[list[int]] = [[] for _ in range(-(-len(packs) // ranks) * ranks)]
    loads = [0] * len(levelled)
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        lightest = min(range(len(loads)), key=loads.__getitem__)
        levelled[lightest].append(index)
        loads[lightest] += lengths[index]
        if loads[lightest] > budget and len(levelled[lightest]) > 1:
            return packs
    return [pack for pack in levelled if pack]


def datum_weights(data: Sequence[Datum], reduction: Reduction, count: int | None) -> list[float]:
    """Return what the losses of each datum's positions are multiplied by, so that their sum is the reduced loss.

    `count` is what the whole batch is divided by, of which `data` may be a part; None means that `data` is the whole.
    """
    divisor = max(1, reduction.count(data) if count is None else count)
    if reduction is not Reduction.SEQUENCE_MEAN:
        return [1.0 / divisor] * len(data)
    return [1.0 / (divisor * max(1, datum.counted_positions)) for datum in data]


def make_packs(
    data: Sequence[Datum],
    input_names: Iterable[str],
    budget: int,
    device: torch.device,
    *,
    fills: Mapping[str, float] | None = None,
    weights: Sequence[float] | None = None,
    ranks: int = 1,
) -> list[Pack]:
    """Pack `data`, with the loss inputs named, for `ranks` packs at a time. The packs' tensors are on `device`.

    `fills` names further inputs, which are left out if no datum has them, and gives their value where a datum lacks
    them. `weights` multiply the losses of each datum; without them all are 1.
    """
    columns = _Columns(data, tuple(input_names), fills or {}, weights or [1.0] * len(data))
    segments = [segment_of(i, datum) for i, datum in enumerate(data)]
    return [
        _make_pack([alike[i] for i in indices], data, columns, device)
        for alike in _of_equal_width(segments, data)
        for indices in plan_rounds([segment.length for segment in alike], budget, ranks)
    ]


def scatter_logprobs(outputs: Sequence[Array], pack: Pack, logprobs: Array) -> None:
    """Write a pack's logprobs, shape [K] or [K, M], to the counted positions of `outputs`, an array for each datum."""
    ends = list(accumulate(len(segment.counted) for segment in pack.segments))
    for segment, values in zip(pack.segments, np.split(logprobs, ends[:-1]), strict=True):
        outputs[segment.index][segment.counted] = values


def _of_equal_width(segments: Sequence[Segment], data: Sequence[Datum]) -> Iterator[list[Segment]]:
    """Group the segments by the targets that they have per position, so that a pack's targets are one array."""
    groups: dict[tuple[int, ...], list[Segment]] = {}
    for segment in segments:
        groups.setdefault(data[segment.index].loss_inputs["target_tokens"].shape[1:], []).append(segment)
    yield from groups.values()


class _Columns:
    """Reads the loss inputs of segments as columns."""

    def __init__(
        self, data: Sequence[Datum], names: tuple[str, ...], fills: Mapping[str, float], weights: Sequence[float]
    ) -> None:
        self._data = data
        self._fills = fills
        self._weights = weights
        self._names = (*names, *(name for name in fills if any(name in datum.loss_inputs for datum in data)))

    def inputs(self, segments: Sequence[Segment]) -> dict[str, Tensor]:
        """Return each input at the counted positions of the segments, and the segments' counted lengths."""
        columns = {name: np.concatenate([self._values(s, name) for s in segments]) for name in self._names}
        lengths = torch.tensor([len(segment.counted) for segment in segments])
        return {name: _loss_input(name, values) for name, values in columns.items()} | {SEQUENCE_LENGTHS: lengths}

    def weights(self, segments: Sequence[Segment]) -> Tensor:
        """Return the weight of each counted position's datum."""
        return torch.from_numpy(np.concatenate([self._full(s, self._weights[s.index]) for s in segments]))

    def _values(self, segment: Segment, name: str) -> Array:
        values = self._data[segment.index].loss_inputs.get(name)
        return self._full(segment, self._fills[name]) if values is None else values[segment.counted]

    @staticmethod
    def _full(segment: Segment, value: float) -> Array:
        return np.full(len(segment.counted), value, np.float32)


def _make_pack(segments: list[Segment], data: Sequence[Datum], columns: _Columns, device: torch.device) -> Pack:
    lengths = [segment.length for segment in segments]
    starts = [0, *accumulate(lengths)][:-1]
    tokens = np.concatenate([data[s.index].model_input[: s.length] for s in segments])
    positions = np.concatenate([np.arange(length) for length in lengths])
    counted = np.concatenate([s.counted + start for s, start in zip(segments, starts, strict=True)])
    return Pack(
        tuple(segments),
        torch.from_numpy(tokens.astype(np.int64)).to(device)[None],
        torch.from_numpy(positions.astype(np.int64)).to(device)[None],
        torch.from_numpy(counted).to(device),
        {name: values.to(device) for name, values in columns.inputs(segments).items()},
        columns.weights(segments).to(device),
    )


def _loss_input(name: str, values: Array) -> Tensor:
    return torch.from_numpy(values.astype(np.int64 if name == "target_tokens" else np.float32))
