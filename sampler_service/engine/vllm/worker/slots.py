"""Puts adapters directly into vLLM's slots: one copy from the staged file, between two steps.

vLLM itself would read the file into tensors, scale them in a copy, clear the slot and copy again. Everything after that
remains vLLM's: which adapter is in which slot, which one is evicted if all are taken, and how an evicted one returns,
for which vLLM asks the adapter for its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import (
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from paceline.weights import read_header
from sampler_service.engine.vllm.worker.internals import VllmInternals
from sampler_service.engine.vllm.worker.mapped_adapter import (
    Layout,
    MappedAdapter,
    Matrices,
    TypedViews,
    map_file,
    matrices,
    read_file,
    read_layout,
)
from sampler_service.engine.vllm.worker.upload import Uploader

_MOST_LAYOUTS = 64
"""Most cached layouts; there is one for each combination of rank, modules, alpha and dtype."""

_LAYERS = (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)
"""Layers whose weights are an A and a B for each part. A mixture's experts are stacked in other ways."""

_PLAIN = (BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora)
"""`set_lora` of layers that store A and B unchanged, each part in slot tensors of its own."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where an adapter's matrices go in a slot; it is the same for all adapters of one layout."""

    plain: list[str] = field(default_factory=list)
    """Layers that are written here; vLLM sets and clears the others."""
    a: list[Tensor] = field(default_factory=list)
    b: list[Tensor] = field(default_factory=list)
    rest: list[Tensor] = field(default_factory=list)
    """The parts of the slot in those layers that the matrices do not cover."""


class SlotWriter:
    """Writes into the slots of one worker, in the worker's own thread."""

    def __init__(self, internals: VllmInternals) -> None:
        self._internals = internals
        self._uploader = Uploader(internals.device)
        self._layouts: dict[tuple[bytes, bytes], Layout] = {}
        self._plans: dict[tuple[int, Layout], _Plan] = {}
        self._touched: set[str] = set()
        """Layers that some adapter has written; in all others every slot is still zero."""

    def takes(self, directory: Path) -> bool:
        """Return whether this class can write every layer that an adapter touches."""
        layers = self._internals.layers
        return all(isinstance(layers[name], _LAYERS) for name in self._layout(directory).modules)

    def add(self, adapter_id: int, directory: Path, *, in_memory: bool) -> bool:
        """Register an adapter and put it into a slot; return False if running requests use every slot.

        In that case vLLM finds a slot when it first schedules a request for the adapter. `in_memory` means that the
        file is in memory and never changes, so that it can be mapped instead of read.
        """
        if self._internals.holds(adapter_id):
            return True
        layout = self._layout(directory)
        data = (map_file if in_memory else read_file)(directory / WEIGHTS_FILE, layout.size)
        adapter = MappedAdapter(adapter_id, layout, data, self._internals.dtype)
        slot = self._internals.empty_a_slot()
        if slot is not None:
            self._write(slot, adapter)
        self._internals.register(adapter, slot)
        return slot is not None

    def _layout(self, directory: Path) -> Layout:
        internals = self._internals
        key = (read_header(directory / WEIGHTS_FILE), (directory / CONFIG_FILE).read_bytes())
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
                self._plans.clear()
            peft = internals.read_config(directory)
            layout = read_layout(directory, peft, internals.layers, internals.packed, internals.rename)
            self._layouts[key] = layout
            self._touched |= layout.modules.keys()
        return self._layouts[key]

    def _write(self, slot: int, adapter: MappedAdapter) -> None:
        """Write every layer of a slot, so that nothing of its previous adapter remains."""
        views, sources = TypedViews(self._uploader.upload(adapter.data)), list[Matrices]()
        plan = self._plans.get((slot, adapter.layout)) or self._plan(slot, adapter.layout)
        for name in plan.plain:
            sources += filter(None, self._of_this_rank(name, adapter.layout, views))
        _copy_all(plan.a, [source.a for source in sources])
        if all(source.scaling == 1 for source in sources):
            _copy_all(plan.b, [source.b for source in sources])
        else:
            for b, source in zip(plan.b, sources, strict=True):
                _copy_scaled(b, source)
        for rest in plan.rest:
            rest.zero_()
        for name in self._touched - set(plan.plain):
            layer, weights = self._internals.layers[name], adapter.get_lora(name)
            if weights is None:
                layer.reset_lora(slot)
            else:
                layer.set_lora(slot, weights.lora_a, weights.lora_b)

    def _plan(self, slot: int, layout: Layout) -> _Plan:
        plan, shapes = _Plan(), TypedViews(torch.empty(layout.size, dtype=torch.uint8, device="meta"))
        for name, stored in layout.modules.items():
            layer = self._internals.layers[name]
            if type(layer).set_lora not in _PLAIN or len(stored) != layer.n_slices:
                continue
            plan.plain.append(name)
            for i, part in enumerate(self._of_this_rank(name, layout, shapes)):
                a, b = (None, None) if part is None else (part.a, part.b)
                _place(layer.lora_a_stacked[i][slot, 0], a, plan.a, plan.rest)
                _place(layer.lora_b_stacked[i][slot, 0], b, plan.b, plan.rest)
        self._plans[slot, layout] = plan
        return plan

    def _of_this_rank(self, name: str, layout: Layout, views: TypedViews) -> Sequence[Matrices | None]:
        """Return a layer's matrices, cut to this worker's shard under tensor parallelism."""
        layer: Any = self._internals.layers[name]
        parts = matrices(layout.modules[name], views)
        if layer.tp_size == 1:
            return parts
        a: Any = [None if part is None else part.a for part in parts]
        b: Any = [None if part is None else part.b for part in parts]
        if name in layout.packed:
            a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
        else:
            a, b = [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]
        cut = zip(parts, a, b, strict=True)
        return [None if part is None else Matrices(one_a, one_b, part.scaling) for part, one_a, one_b in cut]


def _place(slot: Tensor, matrix: Tensor | None, into: list[Tensor], rest: list[Tensor]) -> None:
    """Record which part of a slot's matrix an adapter's matrix fills, and which parts remain."""
    rows, columns = (0, 0) if matrix is None else matrix.shape
    if matrix is not None:
        into.append(slot[:rows, :columns])
    rest.extend(part for part in (slot[rows:], slot[:rows, columns:]) if part.numel())


def _copy_all(into: list[Tensor], sources: list[Tensor]) -> None:
    """Copy matrices in one call; an adapter that has only the output head has none here."""
    if into:
        torch._foreach_copy_(into, sources)


def _copy_scaled(into: Tensor, source: Matrices) -> None:
    """Round to the slot's dtype, then scale, in the same order as vLLM, which gives the same bits."""
    if source.b.dtype == into.dtype:
        torch.mul(source.b, source.scaling, out=into)
    else:
        into.copy_(source.b).mul_(source.scaling)
