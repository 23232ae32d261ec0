"""Ragged datums side by side in one row: no padding, a fixed budget of tokens for each forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.types import Datum
from paceline.types.training import Array
from trainer_service.engine.loss_specs import MASK


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
    """shape [K] each; target_tokens is int64, the rest float32."""

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


def make_packs(data: Sequence[Datum], input_names: Iterable[str], budget: int, device: torch.device) -> list[Pack]:
    """Pack `data`, with the loss inputs named. The packs' tensors are on `device`."""
    names = tuple(input_names)
    segments = [segment_of(i, datum) for i, datum in enumerate(data)]
    plan = plan_packs([segment.length for segment in segments], budget)
    return [_make_pack([segments[i] for i in indices], data, names, device) for indices in plan]


def scatter_logprobs(outputs: Sequence[Array], pack: Pack, logprobs: Array) -> None:
    """Write a pack's logprobs, shape [K], to the counted positions of `outputs`, one array per datum of the request."""
    ends = list(accumulate(len(segment.counted) for segment in pack.segments))
    for segment, values in zip(pack.segments, np.split(logprobs, ends[:-1]), strict=True):
        outputs[segment.index][segment.counted] = values


def _make_pack(segments: list[Segment], data: Sequence[Datum], names: tuple[str, ...], device: torch.device) -> Pack:
    lengths = [segment.length for segment in segments]
    starts = [0, *accumulate(lengths)][:-1]
    tokens = np.concatenate([data[s.index].model_input[: s.length] for s in segments])
    positions = np.concatenate([np.arange(length) for length in lengths])
    counted = np.concatenate([s.counted + start for s, start in zip(segments, starts, strict=True)])
    inputs = {name: np.concatenate([data[s.index].loss_inputs[name][s.counted] for s in segments]) for name in names}
    return Pack(
        tuple(segments),
        torch.from_numpy(tokens.astype(np.int64)).to(device)[None],
        torch.from_numpy(positions.astype(np.int64)).to(device)[None],
        torch.from_numpy(counted).to(device),
        {name: _loss_input(name, values).to(device) for name, values in inputs.items()},
    )


def _loss_input(name: str, values: Array) -> Tensor:
    return torch.from_numpy(values.astype(np.int64 if name == "target_tokens" else np.float32))
