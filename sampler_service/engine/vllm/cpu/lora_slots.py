"""The slots of vLLM's LoRA layers on a CPU, in the layouts that the matrix products need.

PyTorch's bfloat16 products set up oneDNN at each call, which takes several times as long as multiplying a few rows by a
low-rank factor. vLLM has AMX kernels that avoid this and take weights in a layout of their own. If they are available,
each slot has a second copy in that layout, made when the slot is first used after it was written.
"""

# ruff: noqa: SLF001 - vLLM's kernels and PyTorch's write counters have private names; only this module uses them

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
"""Total rank of all parts above which multiplying the zeros between the blocks takes longer than more calls."""
_TILE = 32
"""Rows and columns of packed weights are multiples of this."""
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
    """B of every slot, for layers whose A x is already computed."""

    b: Tensor
    """[slots, out, ranks]"""

    def add(self, y: Tensor, x: Tensor, slot: int, scale: float) -> None:
        """Add B x of a slot to y in place; y has shape [N, out], x [N, ranks]."""
        add_product(y, x, self.b[slot], scale)


class Pair:
    """A and B of every slot for one pair of products: those of one part of a layer, or of several parts joined."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """Shapes: a [slots, ranks, in], b [slots, out, ranks]."""
        self.a, self.b = a, b
        self.out = b.size(1)

    @property
    def nbytes(self) -> int:
        """Size of all slots in bytes."""
        return self.a.nbytes + self.b.nbytes

    def prepare(self, slots: Iterable[int]) -> None:
        """Prepare slots that products are about to read."""

    def add(self, y: Tensor, x: Tensor, slot: int, scale: float) -> None:
        """Add B A x of a slot to y in place; y has shape [N, out], x [N, in]."""
        add_product(y, x @ self.a[slot].T, self.b[slot], scale)

    def product(self, x: Tensor, slots: slice) -> Tensor:
        """Return B A x [slots, N, out] of consecutive slots, each with its own x [N, in] of `x`."""
        return x @ self.a[slots].mT @ self.b[slots].mT


class PackedPair(Pair):
    """A pair computed by vLLM's AMX kernels. Ranks, heights of parts, and a's columns are multiples of the tile.

    Each part's b is written separately, as one contiguous tensor. The packed copies form a block diagonal.

    A step of few rows calls this a hundred times or more, so Python overhead here weighs as much as the products.
    """

    def __init__(self, a: Tensor, parts: Sequence[Tensor]) -> None:
        """Shapes: a [slots, ranks, in], and b [slots, out, ranks of the part] for each part, with an even rank."""
        slots, self._ranks, _ = a.shape
        self.out = sum(part.size(1) for part in parts)
        self.a, self.parts = a, parts
        self._a, self._b = torch.empty_like(a), a.new_zeros(slots, self.out, self._ranks)
        self._slots = list(zip(self._a, self._b, strict=True))
        self._blocks = [self._blocks_of(slot) for slot in range(slots)]
        # An alias made by `data` has a version counter of its own, which counts only writes to it and its views.
        self.written = [tuple(one.data[slot] for one in (a, *parts)) for slot in range(slots)]
        """The tensors of each slot that are written: its a, and every part's b."""
        self._whole = (a, *parts)
        """Their counters detect writes to a whole tensor. None are expected; after one, every slot is packed again."""
        self._packed: list[tuple[int, ...]] = [()] * slots
        """The write counts of each slot when it was last packed."""

    # vLLM's AVX2-only build lacks these kernels, so they are looked up on first use.
    @cached_property
    def _multiply(self) -> Any:
        return torch.ops._C.weight_packed_linear.default

    @cached_property
    def _multiply_all(self) -> Any:
        return torch.ops._C.bmm_cpu.default

    def _blocks_of(self, slot: int) -> list[tuple[_Array, _Array]]:
        """Return views of a packed slot and of its sources, paired, with shape [rows / tile, tile, columns / 2]."""
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
    """View a bfloat16 matrix as pairs of neighbours in each row: int32 [rows / tile, tile, columns / 2]."""
    pairs: _Array = matrix.view(torch.int32).view(-1, _TILE, matrix.size(1) // 2).numpy()
    return pairs


def _packed_blocks(matrix: Tensor) -> _Array:
    """Return the same view of a packed matrix, which stores a pair of columns contiguously for all rows of a tile."""
    pairs: _Array = matrix.view(-1, 2).view(torch.int32).view(-1, matrix.size(1) // 2, _TILE).numpy()
    return pairs.transpose(0, 2, 1)


class _Slots(Tensor):
    """A part's slots [slots, 1, rows, columns], which vLLM writes one at a time; each slot counts its own writes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    slots: list[Tensor]
    """Views [1, rows, columns]."""

    def __getitem__(self, key: Any) -> Tensor:
        slot, *rest = key if isinstance(key, tuple) else (key,)
        return self.slots[slot][tuple(rest)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key].copy_(torch.as_tensor(value))


class Slots(tuple[Tensor, ...]):
    """A layer's A or B as vLLM holds them: each part's slots [slots, 1, rows, columns], views of the pairs' tensors."""

    pairs: tuple[Pair, ...]
    """Pairs, each of consecutive parts."""


def lay_out(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Slots, Slots]:
    """Copy a layer's A and B into new layouts; each part's are [slots, 1, ranks, in] and [slots, 1, out, ranks].

    All parts have the same x. If one pair for all is faster than a pair for each, their A are stacked and their B form
    a block diagonal, so that each B sees its own part of A x.
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
    """Return whether DNNL_MAX_CPU_ISA permits AMX in oneDNN, which vLLM's kernels call; they abort otherwise.

    oneDNN reports only its support of float16, which every CPU with AMX has; it reports none if the limit is below AMX.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


_Views = list[tuple[Tensor, Tensor]]
"""For each part, the views where its A and B are written: [slots, 1, ranks, in] and [slots, 1, out, ranks]."""


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
