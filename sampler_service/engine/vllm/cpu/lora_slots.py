"""The slots of vLLM's LoRA layers on a CPU, in the layouts that the products want.

PyTorch's bfloat16 products prepare oneDNN anew at each call, which takes several times as long as multiplying a few
rows by a low-rank factor does. vLLM has kernels for AMX that take weights in a layout of their own and do without:
where they serve, each slot has a second copy in that layout, made when the slot is first used after it was written.
"""

# ruff: noqa: SLF001 - vLLM's kernels and PyTorch's counts of writes have private names; they are used here alone

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

_MOST_JOINED_RANKS = 96
"""Ranks of all parts together above which multiplying the zeros between the blocks takes longer than more calls."""
_TILE = 32
"""Rows and columns of packed weights are multiples of it."""
FEW_ROWS = 64
"""Rows up to which reading the weights takes longer than multiplying."""
_Array = np.ndarray[tuple[int, int, int], np.dtype[np.int32]]


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
        self.out = b.size(1)

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
    """The same by vLLM's kernels for AMX. Ranks, heights of parts, and a's columns are multiples of the tile.

    Each part's b is written on its own, in one piece. Packed, they lie on a diagonal of blocks.

    A step of few rows calls this a hundred times and more: what Python does here takes as long as the products.
    """

    def __init__(self, a: Tensor, parts: Sequence[Tensor]) -> None:
        """Take a [slots, ranks, in] and for each part b [slots, out, ranks of the part], an even number of ranks."""
        slots, self._ranks, _ = a.shape
        self.out = sum(part.size(1) for part in parts)
        self.a, self.parts = a, parts
        self._a, self._b = torch.empty_like(a), a.new_zeros(slots, self.out, self._ranks)
        self._slots = list(zip(self._a, self._b, strict=True))
        self._blocks = [self._blocks_of(slot) for slot in range(slots)]
        # An alias made by `data` counts the writes to it and to its views, and to no others.
        self.written = [tuple(one.data[slot] for one in (a, *parts)) for slot in range(slots)]
        """Each slot of a and of every part's b, as it is written."""
        self._whole = (a, *parts)
        """Their counters see writes to a whole tensor. None is expected; after one, every slot is packed again."""
        self._packed: list[tuple[int, ...]] = [()] * slots
        """The writes that were counted when each slot was packed."""

    # vLLM's build for CPUs with AVX2 alone lacks these kernels, so they are looked up when they are first used.
    @cached_property
    def _multiply(self) -> Any:
        return torch.ops._C.weight_packed_linear.default

    @cached_property
    def _multiply_all(self) -> Any:
        return torch.ops._C.bmm_cpu.default

    def _blocks_of(self, slot: int) -> list[tuple[_Array, _Array]]:
        """Return views of a packed slot and of what goes there, of the same shapes [rows / tile, tile, columns / 2]."""
        blocks = [(_packed_blocks(self._a[slot]), _blocks(self.a[slot]))]
        b, row, column = _packed_blocks(self._b[slot]), 0, 0
        for part in self.parts:
            source = _blocks(part[slot])
            blocks.append((b[row : row + len(source), :, column : column + source.shape[2]], source))
            row, column = row + len(source), column + source.shape[2]
        return blocks

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.a, *self.parts, self._a, self._b))

    def prepare(self, slots: Iterable[int]) -> None:
        whole = [one._version for one in self._whole]
        for slot in slots:
            writes = (*whole, *[one._version for one in self.written[slot]])
            if writes != self._packed[slot]:
                for into, source in self._blocks[slot]:
                    np.copyto(into, source)
                self._packed[slot] = writes

    def add(self, y: Tensor, x: Tensor, slot: int, scale: float) -> None:
        (a, b), rows = self._slots[slot], x.size(0)
        shrunk = torch.empty(rows, self._ranks, dtype=x.dtype)
        self._multiply(shrunk, x, a, None, True)
        if rows > FEW_ROWS:
            self._add_parts(y, shrunk, slot, scale)
            return
        delta = torch.empty(rows, self.out, dtype=x.dtype)
        self._multiply(delta, shrunk, b, None, True)
        y.add_(delta, alpha=scale)

    def _add_parts(self, y: Tensor, shrunk: Tensor, slot: int, scale: float) -> None:
        row = column = 0
        for part in self.parts:
            _, height, ranks = part.shape
            add_product(y[:, row : row + height], shrunk[:, column : column + ranks], part[slot], scale)
            row, column = row + height, column + ranks

    def product(self, x: Tensor, slots: slice) -> Tensor:
        count, rows, _ = x.shape
        shrunk = torch.empty(count, rows, self._ranks, dtype=x.dtype)
        self._multiply_all(shrunk, x, self._a[slots], True, None)
        out = torch.empty(count, rows, self.out, dtype=x.dtype)
        self._multiply_all(out, shrunk, self._b[slots], True, None)
        return out


def _blocks(matrix: Tensor) -> _Array:
    """Return pairs of neighbours in each row of a bfloat16 matrix: int32 [rows / tile, tile, columns / 2], a view."""
    pairs: _Array = matrix.view(torch.int32).view(-1, _TILE, matrix.size(1) // 2).numpy()
    return pairs


def _packed_blocks(matrix: Tensor) -> _Array:
    """Return the same of a packed matrix, where a pair of columns lies together for all rows of a tile."""
    pairs: _Array = matrix.view(-1, 2).view(torch.int32).view(-1, matrix.size(1) // 2, _TILE).numpy()
    return pairs.transpose(0, 2, 1)


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
        pair, into = (_packed_pair if _can_pack(a_parts, b_parts) else _plain_pair)(a_parts, b_parts)
        pairs.append(pair)
        a_views += [view.copy_(one) for (view, _), one in zip(into, a_parts, strict=True)]
        b_views += [view.copy_(one) for (_, view), one in zip(into, b_parts, strict=True)]
    both = Slots(a_views), Slots(b_views)
    for slots in both:
        slots.pairs = tuple(pairs)
    return both


def _can_pack(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    fits = a[0].shape[3] % _TILE == 0 and all(one.shape[2] % _TILE == one.shape[3] % 2 == 0 for one in b)
    return fits and check_cpu_sgl_kernel(_TILE, _TILE, a[0].dtype) and _onednn_may_use_amx()


def _onednn_may_use_amx() -> bool:
    """Whether DNNL_MAX_CPU_ISA leaves AMX to oneDNN, which vLLM's kernels call. Where it does not, they abort.

    oneDNN tells of float16 alone, which every CPU with AMX computes: it is refused where the limit is below AMX's.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


_Views = list[tuple[Tensor, Tensor]]
"""For each part where its A and its B are written: [slots, 1, ranks, in] and [slots, 1, out, ranks]."""


def _plain_pair(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Pair, _Views]:
    slots, _, _, width = a[0].shape
    ranks, height = (sum(part.shape[2] for part in parts) for parts in (a, b))
    pair = Pair(a[0].new_zeros(slots, ranks, width), b[0].new_zeros(slots, height, ranks))
    views, row, column = _Views(), 0, 0
    for one, other in zip(a, b, strict=True):
        columns, rows = slice(column, column + one.shape[2]), slice(row, row + other.shape[2])
        views.append((pair.a[:, None, columns], pair.b[:, None, rows, columns]))
        row, column = rows.stop, columns.stop
    return pair, views


def _packed_pair(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Pair, _Views]:
    slots, _, _, width = a[0].shape
    ranks = -(-sum(part.shape[2] for part in a) // _TILE) * _TILE
    pair = PackedPair(a[0].new_zeros(slots, ranks, width), [part[:, 0].clone() for part in b])
    views, column = _Views(), 0
    for i, one in enumerate(a):
        columns = slice(column, column + one.shape[2])
        a_view, b_view = (part[:, None].as_subclass(_Slots) for part in (pair.a[:, columns], pair.parts[i]))
        a_view.slots = [written[0][None, columns] for written in pair.written]
        b_view.slots = [written[i + 1][None] for written in pair.written]
        views.append((a_view, b_view))
        column = columns.stop
    return pair, views
