"""Pack datums of different lengths into one row, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.types import Datum, Reduction
from paceline.types.training import Array
from trainer_service.engine.loss.losses import SEQUENCE_LENGTHS
from trainer_service.engine.loss.specs import MASK


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
    input_ids: Tensor
    """int64, shape [1, T]."""
    position_ids: Tensor
    """int64, shape [1, T]; restarts at 0 with each segment."""
    counted: Tensor
    """int64, shape [K]: counted positions within the pack."""
    loss_inputs: dict[str, Tensor]
    """shape [K] each, or [K, M] for M targets per position; target_tokens is int64, the rest float32.

    Also holds `SEQUENCE_LENGTHS`, int64, one for each segment.
    """
    weights: Tensor
    """float32, shape [K]: each position's loss is multiplied by this, its datum's weight in the batch."""

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment, in order."""
        return tuple(segment.length for segment in self.segments)


def segment_of(index: int, datum: Datum) -> PackedSegment:
    """Find the counted positions of a datum: those where the mask is not 0, or all without a mask."""
    mask = datum.loss_inputs.get(MASK)
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


class Batch:
    """The datums of a request, read a pass at a time."""

    def __init__(
        self,
        data: Sequence[Datum],
        input_names: Iterable[str],
        *,
        fills: Mapping[str, float] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Create a batch of datums with the named loss inputs.

        `fills` maps further inputs to their values for datums that lack them; an input that no datum has is omitted.
        `weights` multiply the losses of each datum; the default is 1 for all.
        """
        self._data = data
        self._fills = fills or {}
        self._weights = weights or [1.0] * len(data)
        optional = (name for name in self._fills if any(name in datum.loss_inputs for datum in data))
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
                groups.setdefault(datum.loss_inputs["target_tokens"].shape[1:], []).append(segment)
        return [sorted(group, key=lambda segment: -segment.length) for group in groups.values()]

    def pack(self, segments: Sequence[PackedSegment], device: torch.device) -> Pack:
        """Pack segments into one row, on `device`."""
        lengths = [segment.length for segment in segments]
        starts = [0, *accumulate(lengths)][:-1]
        tokens = np.concatenate([self._data[s.index].model_input[: s.length] for s in segments])
        positions = np.concatenate([np.arange(length) for length in lengths])
        counted = np.concatenate([s.counted + start for s, start in zip(segments, starts, strict=True)])
        return Pack(
            tuple(segments),
            torch.from_numpy(tokens.astype(np.int64)).to(device)[None],
            torch.from_numpy(positions.astype(np.int64)).to(device)[None],
            torch.from_numpy(counted).to(device),
            {name: values.to(device) for name, values in self._inputs(segments).items()},
            torch.from_numpy(np.concatenate([_full(s, self._weights[s.index]) for s in segments])).to(device),
        )

    def _inputs(self, segments: Sequence[PackedSegment]) -> dict[str, Tensor]:
        """Return each input at the segments' counted positions, and the number of counted positions per segment."""
        columns = {name: np.concatenate([self._values(s, name) for s in segments]) for name in self._names}
        lengths = torch.tensor([len(segment.counted) for segment in segments])
        return {name: _loss_input(name, values) for name, values in columns.items()} | {SEQUENCE_LENGTHS: lengths}

    def _values(self, segment: PackedSegment, name: str) -> Array:
        values = self._data[segment.index].loss_inputs.get(name)
        return _full(segment, self._fills[name]) if values is None else values[segment.counted]


def _full(segment: PackedSegment, value: float) -> Array:
    return np.full(len(segment.counted), value, np.float32)


def _loss_input(name: str, values: Array) -> Tensor:
    return torch.from_numpy(values.astype(np.int64 if name == "target_tokens" else np.float32))
