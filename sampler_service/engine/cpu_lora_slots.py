"""The slots of vLLM's LoRA layers on a CPU, in the layouts that the products want.

PyTorch's bfloat16 products prepare oneDNN anew at each call, which takes several times as long as multiplying a few
rows by a low-rank factor does. vLLM has kernels for AMX that take weights in a layout of their own and do without:
where they serve, each slot has a second copy in that layout, made when the slot is first used after it was written.
"""

# ruff: noqa: SLF001 - vLLM's kernels and PyTorch's counts of writes have private names; they are used here alone

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

_MOST_JOINED_RANKS = 96
"""Ranks of all parts together above which multiplying the zeros between the blocks takes longer than more calls."""
_TILE = 32
"""Rows and columns of packed weights are multiples of it."""
FEW_ROWS = 64
"""Rows up to which reading the weights takes longer than multiplying."""


def add_product(y: Tensor, x: Tensor, weight: Tensor, scale: float) -> None:
    """Add the product of x [N, in] and weight [out, in] to y [N, out] in place."""
    if y.size(0) > FEW_ROWS and y.dtype == weight.dtype:
        y.addmm_(x, weight.T, alpha=scale)
    else:
        y.add_(x @ weight.T, alpha=scale)


@dataclass(frozen=True, slots=True)
class Expansion:
    """B of every slot, where A x is there already."""

    b: Tensor
    """[slots, out, ranks]"""

    def add(self, y: Tensor, x: Tensor, slot: int, scale: float) -> None:
        """Add B x of a slot to y in place; y has shape [N, out], x [N, ranks]."""
        add_product(y, x, self.b[slot], scale)


class Pair:
    """A and B of every slot for one pair of products: those of one part of a layer, or of several parts joined."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """Take a [slots, ranks, in] and b [slots, out, ranks]."""
        self.a, self.b = a, b

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.a.nbytes + self.b.nbytes

    def prepare(self, slots: Iterable[int]) -> None:
        """Get slots ready that products are about to read."""

    def add(self, y: Tensor, x: Tensor, slot: int, scale: float) -> None:
        """Add B A x of a slot to y in place; y has shape [N, out], x [N, in]."""
        add_product(y, x @ self.a[slot].T, self.b[slot], scale)

    def product(self, x: Tensor, slots: slice) -> Tensor:
        """Return B A x [slots, N, out] of consecutive slots, each with its own x [N, in] of `x`."""
        return x @ self.a[slots].mT @ self.b[slots].mT


class PackedPair(Pair):
    """The same by vLLM's kernels for AMX. Ranks, and b's rows, are multiples of the tile; a's columns, too.

    A step of few rows calls this a hundred times and more: what Python does here takes as long as the products.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__(a, b)
        self._multiply, self._multiply_all = torch.ops._C.weight_packed_linear.default, torch.ops._C.bmm_cpu.default
        self._a, self._b = torch.empty_like(a), torch.empty_like(b)
        self._slots = list(zip(self._a, self._b, strict=True))
        # An alias made by `data` counts the writes to it and to its views, and to no others.
        self.written = [(a.data[slot], b.data[slot]) for slot in range(a.size(0))]
        """Each slot of a and b, as it is written."""
        self._packed = [(-1, -1)] * a.size(0)
        """The writes that were counted when each slot was packed."""
        self._ranks, self._out = a.size(1), b.size(1)

    @property
    def nbytes(self) -> int:
        return 2 * super().nbytes

    def prepare(self, slots: Iterable[int]) -> None:
        for slot in slots:
            a, b = self.written[slot]
            writes = (a._version, b._version)
            if writes != self._packed[slot]:
                self._a[slot].copy_(torch.ops._C.convert_weight_packed.default(a))
                self._b[slot].copy_(torch.ops._C.convert_weight_packed.default(b))
                self._packed[slot] = writes

    def add(self, y: Tensor, x: Tensor, slot: int, scale: float) -> None:
        (a, b), rows = self._slots[slot], x.size(0)
        shrunk = torch.empty(rows, self._ranks, dtype=x.dtype)
        self._multiply(shrunk, x, a, None, True)
        if rows > FEW_ROWS:
            add_product(y, shrunk, self.b[slot], scale)
            return
        delta = torch.empty(rows, self._out, dtype=x.dtype)
        self._multiply(delta, shrunk, b, None, True)
        y.add_(delta, alpha=scale)

    def product(self, x: Tensor, slots: slice) -> Tensor:
        count, rows, _ = x.shape
        shrunk = torch.empty(count, rows, self._ranks, dtype=x.dtype)
        self._multiply_all(shrunk, x, self._a[slots], True, None)
        out = torch.empty(count, rows, self._out, dtype=x.dtype)
        self._multiply_all(out, shrunk, self._b[slots], True, None)
        return out


class _Slots(Tensor):
    """A part's slots [slots, 1, rows, columns] as vLLM writes them: one at a time, so that each counts its writes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    slots: list[Tensor]
    """Views [1, rows, columns]."""

    def __getitem__(self, key: Any) -> Tensor:
        slot, *rest = key if isinstance(key, tuple) else (key,)
        return self.slots[slot][tuple(rest)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key].copy_(torch.as_tensor(value))


class Slots(tuple[Tensor, ...]):
    """What vLLM keeps as a layer's A or B: each part's slots [slots, 1, rows, columns], which are views of pairs'."""

    pairs: tuple[Pair, ...]
    """Of consecutive parts."""


def lay_out(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Slots, Slots]:
    """Take over a layer's A and B, for each part [slots, 1, ranks, in] and [slots, 1, out, ranks].

    One pair serves all parts, which see the same x, where that takes less time than a pair for each: their A are put
    below each other and their B on a diagonal of blocks, so that each sees its own part of A x.
    """
    joined = sum(part.shape[2] for part in a) <= _MOST_JOINED_RANKS
    groups = [(a, b)] if joined else [([one], [other]) for one, other in zip(a, b, strict=True)]
    pairs, a_views, b_views = list[Pair](), list[Tensor](), list[Tensor]()
    for a_parts, b_parts in groups:
        pair = _pair(a_parts, b_parts)
        pairs.append(pair)
        row = column = 0
        for one, other in zip(a_parts, b_parts, strict=True):
            (ranks, width), height = one.shape[2:], other.shape[2]
            a_views.append(_view(pair, 0, slice(column, column + ranks), slice(width)).copy_(one))
            b_views.append(_view(pair, 1, slice(row, row + height), slice(column, column + ranks)).copy_(other))
            row, column = row + height, column + ranks
    both = Slots(a_views), Slots(b_views)
    for slots in both:
        slots.pairs = tuple(pairs)
    return both


def _pair(a: Sequence[Tensor], b: Sequence[Tensor]) -> Pair:
    slots, _, _, width = a[0].shape
    ranks, height = (sum(part.shape[2] for part in parts) for parts in (a, b))
    packed = width % _TILE == height % _TILE == 0 and check_cpu_sgl_kernel(_TILE, _TILE, a[0].dtype)
    if packed:
        ranks = -(-ranks // _TILE) * _TILE
    return (PackedPair if packed else Pair)(a[0].new_zeros(slots, ranks, width), b[0].new_zeros(slots, height, ranks))


def _view(pair: Pair, which: int, rows: slice, columns: slice) -> Tensor:
    view = (pair.a, pair.b)[which][:, None, rows, columns]
    if isinstance(pair, PackedPair):
        view = view.as_subclass(_Slots)
        view.slots = [written[which][None, rows, columns] for written in pair.written]
    return view
