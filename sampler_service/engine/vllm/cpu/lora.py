"""LoRA on vLLM's CPU backend: one pair of GEMMs per adapter in the batch.

vLLM's own CPU operators copy the matrices A and B for every single token before they multiply, which makes a prefill
with an adapter many times slower than one without. When decoding they also treat tokens without an adapter as tokens of
the last slot, so that once all slots are in use, requests to the base model are answered with somebody's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe import layer as moe_layer
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from sampler_service.engine.vllm.cpu import mid_step_loads
from sampler_service.engine.vllm.cpu.kv_cache import clear_on

_FEW_ROWS = 64
"""Rows up to which reading the weights takes longer than multiplying.

Their adapters' products are batched: 8 streams of 4 versions decode 1.3 times as fast.
"""
_EVERY = slice(None)

Rows = slice | Tensor
"""Rows of a batch: a slice of adjacent rows, or their indices as int64 [N]."""
Groups = list[tuple[int, Rows]]
"""Pairs of an adapter's slot and the rows that use it. Rows without an adapter are in no group."""


def group_rows(slots: Tensor) -> Groups:
    """Group the rows of a batch by slot; `slots` has shape [T], -1 for no adapter."""
    present = sorted(set(slots.tolist()))
    if len(present) == 1:  # also covers rows beyond the mapping, which exist when a prompt is scored
        return [(present[0], _EVERY)] if present[0] >= 0 else []
    return [(slot, _together((slots == slot).nonzero()[:, 0])) for slot in present if slot >= 0]


def _together(rows: Tensor) -> Rows:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


class Pair(NamedTuple):
    """A and B of every slot for one part of a layer."""

    a: Tensor | None
    """[slots, ranks, in]; None if A x is already computed."""
    b: Tensor
    """[slots, out, ranks]"""

    def shrink(self, x: Tensor, slots: int | slice) -> Tensor:
        """Return A x [..., N, ranks] of a slot, or of consecutive ones, each with its own x [N, in] of `x`."""
        return x if self.a is None else x @ self.a[slots].mT

    def add(self, y: Tensor, x: Tensor, slot: int, scale: float) -> None:
        """Add B A x of a slot to y in place; y has shape [N, out], x [N, in]."""
        weight, shrunk = self.b[slot], self.shrink(x, slot)
        if y.size(0) > _FEW_ROWS and y.dtype == weight.dtype:
            y.addmm_(shrunk, weight.T, alpha=scale)
        else:
            y.add_(shrunk @ weight.T, alpha=scale)


@dataclass(frozen=True, slots=True)
class Padded:
    """The rows of a small batch with several adapters, padded to the same number per slot, for one batched product.

    Unused slots between the first and the last used one are computed too, and their results dropped. Rows of different
    slots never mix, so that an adapter with non-finite values affects only its own rows.
    """

    slots: slice
    gathered: Tensor
    """int64 [slots * rows per slot]: the batch row at each place; an arbitrary row at empty places."""
    places: Tensor
    """int64 [N]: the occupied places."""
    rows: Tensor | None
    """int64 [N]: the batch rows that these results belong to; None for all rows in order."""

    @classmethod
    def of(cls, slots: Tensor) -> Padded:
        """Place the rows; `slots` has shape [T], -1 for no adapter, and names at least two adapters."""
        rows = (slots >= 0).nonzero()[:, 0]
        rows = rows[slots[rows].argsort(stable=True)]
        own = slots[rows] - slots[rows[0]]
        counts = own.bincount()
        each = int(counts.max())
        places = own * each + torch.arange(len(rows)) - (counts.cumsum(0) - counts)[own]
        gathered = rows.new_zeros(len(counts) * each).index_copy_(0, places, rows)
        first = int(slots[rows[0]])
        taken = slice(first, first + len(counts))
        if len(rows) < len(slots):
            return cls(taken, gathered, places, rows)
        return cls(taken, gathered, torch.empty_like(places).index_copy_(0, rows, places), None)

    def add(self, y: Tensor, x: Tensor, pair: Pair, scale: float) -> None:
        """Add B A x of each row's slot to y in place. Shapes: y [T, out], x [T, in]."""
        count = self.slots.stop - self.slots.start
        placed = x.index_select(0, self.gathered).view(count, -1, x.size(1))
        delta = pair.shrink(placed, self.slots) @ pair.b[self.slots].mT
        delta = delta.view(-1, y.size(1)).index_select(0, self.places)
        if self.rows is None:
            y.add_(delta, alpha=scale)
        else:
            y.index_add_(0, self.rows, delta.to(y.dtype), alpha=scale)


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """Replaces the operators of linear layers, the output head and the embedding.

    Results are rounded where vLLM's operators round them: A x once to the weights' dtype, and B A x once more. In large
    batches B A x is added to y in float32 and rounded with it. Within a product, the CPU's GEMM accumulates in float32.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_groups: Groups = []
        self._sampler_groups: Groups = []
        self._padded: Padded | None = None
        """The padded rows, for batches of few rows and several adapters."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Read the batch's mapping; called before each step whose mapping differs from the previous one's."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        self._token_groups = group_rows(slots)
        self._sampler_groups = group_rows(self.sampler_indices)
        is_small = len(self._token_groups) > 1 and len(slots) <= _FEW_ROWS
        self._padded = Padded.of(slots) if is_small else None

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add B A x to slices of y in place.

        Shapes: y [T, sum of slices], x [T, in], A [slots, 1, r, in], B [slots, 1, slice, r].
        """
        if not self._token_groups:
            return
        if y.dim() > 2:
            y, x = y.view(-1, y.size(-1)), x.view(-1, x.size(-1))
        for part, a, b in zip(torch.split(y, list(output_slices), dim=1), lora_a_stacked, lora_b_stacked, strict=True):
            pair = Pair(a[:, 0], b[:, 0, : part.size(1)])
            if self._padded is not None:
                self._padded.add(part, x, pair, scale)
            else:
                _add_groups(part, x, self._token_groups, pair, scale)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
    ) -> None:
        """Add B A x to the logits in place.

        Shapes: y [T, V or more], x [T, in], A [slots, 1, r, in], B [slots, 1, V, r].
        """
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        width = min(y.shape[1], lora_b_stacked.shape[-2])
        pair = Pair(lora_a_stacked[:, 0], lora_b_stacked[:, 0, :width])
        _add_groups(y.narrow(1, 0, width), x, self._sampler_groups, pair, scale)

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        """Add B x to y in place, or overwrite y if not `add_inputs`; x holds rows of A.

        Shapes: y [T, out], x [T, r], B [slots, 1, out, r].
        """
        if not add_inputs:
            y.zero_()
        _add_groups(y, x, self._token_groups, Pair(None, lora_b_stacked[:, 0]), 1.0)


def _add_groups(y: Tensor, x: Tensor, groups: Groups, pair: Pair, scale: float) -> None:
    """Add the product of each group's rows of x and its slot to the same rows of y in place."""
    for slot, rows in groups:
        if rows == _EVERY:
            pair.add(y, x, slot, scale)
        elif isinstance(rows, slice):
            pair.add(y[rows], x[rows], slot, scale)
        else:
            into = y.index_select(0, rows)
            pair.add(into, x.index_select(0, rows), slot, scale)
            y.index_copy_(0, rows, into)


@contextmanager
def _experts_for_cpus() -> Iterator[None]:
    """Make vLLM compute experts with its CPU kernels. They get no adapters: `VllmEngine` excludes them.

    For models with adapters vLLM selects Triton's kernels, which a CPU does not have, and crashes at the first request.
    """
    layer: Any = moe_layer
    made = layer.FusedMoEConfig
    layer.FusedMoEConfig = lambda **config: made(**config | {"is_lora_enabled": False})
    try:
        yield
    finally:
        layer.FusedMoEConfig = made


class GroupedLoraCpuWorker(CPUWorker):
    """vLLM's CPU worker with these operators; selected through `worker_cls`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with these operators, which its LoRA layers get from the platform."""
        name = f"{GroupedPunicaWrapper.__module__}.{GroupedPunicaWrapper.__name__}"
        current_platform.get_punica_wrapper = lambda: name  # type: ignore[method-assign]
        with _experts_for_cpus():
            super().load_model(*args, **kwargs)
        clear_on(self.model_runner)
        mid_step_loads.add_method()
