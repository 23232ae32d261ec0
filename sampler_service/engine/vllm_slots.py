"""Puts adapters straight into vLLM's slots: one copy from the staged file, between two steps of the scheduler.

vLLM's own way reads the file into tensors, scales them in a copy of its own, clears the slot and copies again. What
stays vLLM's is everything after: which adapter is in which slot, which goes when all are taken, and how one that went
comes back, for which vLLM asks the adapter for its weights.
"""

# ruff: noqa: SLF001 - vLLM's managers have no other way in

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper

from paceline.layout import CONFIG_FILE, WEIGHTS_FILE
from sampler_service.engine.mapped_adapter import (
    Layout,
    MappedAdapter,
    Matrices,
    TypedViews,
    map_file,
    matrices,
    read_file,
    read_layout,
)

_MOST_LAYOUTS = 64
"""Layouts that are remembered: one for each rank, choice of modules, alpha and dtype."""

_LAYERS = (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA)
"""Layers whose weights are an A and a B for each part. Experts of a mixture are stacked in ways of their own."""

_PLAIN = (BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora)
"""How layers are set that keep A and B as they come, each part in slot tensors of its own."""

Pairs = list[tuple[Tensor, Tensor]]
"""A and B of part after part."""


class SlotWriter:
    """Works on the LoRA manager of one worker, in the worker's own thread."""

    def __init__(self, manager: LRUCacheLoRAModelManager, max_positions: int | None) -> None:
        self._manager = manager
        self._max_positions = max_positions
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._rename = mapper.get_rename_mapper()._map_name if mapper else str
        self._layouts: dict[tuple[bytes, bytes], Layout] = {}
        self._written: dict[int, Layout] = {}
        self._targets: dict[tuple[int, Layout], Pairs] = {}

    def unmatched(self, modules: Sequence[str]) -> list[str]:
        """Return those of an adapter's modules (PEFT's names) that vLLM has no layer for."""
        manager = self._manager
        served = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        return [name for name in modules if self._rename(name) not in served]

    def takes(self, directory: Path) -> bool:
        """Return whether every layer that an adapter touches is of a kind that is written here."""
        layers = self._manager.modules
        return all(isinstance(layers[name], _LAYERS) for name in self._layout(directory).modules)

    def add(self, adapter_id: int, directory: Path, in_use: Collection[int], *, in_memory: bool) -> bool:
        """Take an adapter in and put it into a slot; return whether there was one that no running request uses.

        Where there was none, vLLM finds one when it first schedules a request for the adapter. `in_memory` says that
        the file lies in memory and stays as it is, so that it need not be read.
        """
        manager = self._manager
        if adapter_id in manager._registered_adapters:
            return True
        layout = self._layout(directory)
        data = (map_file if in_memory else read_file)(directory / WEIGHTS_FILE, layout.size)
        dtype: Any = manager.lora_config.lora_dtype
        adapter = MappedAdapter(adapter_id, layout, data, dtype, self._read_by_vllm)
        slot = self._free_slot(in_use)
        if slot is not None:
            self._write(slot, adapter)
        if len(manager) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager._registered_adapters[adapter_id] = adapter
        if slot is not None:
            manager._active_adapters[adapter_id] = None
            manager.lora_index_to_id[slot] = adapter_id
        return slot is not None

    def _layout(self, directory: Path) -> Layout:
        manager, config = self._manager, (directory / CONFIG_FILE).read_bytes()
        with (directory / WEIGHTS_FILE).open("rb") as file:
            key = (file.read(int.from_bytes(file.read(8), "little")), config)
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
                self._targets.clear()
            peft = PEFTHelper.from_local_dir(str(directory), self._max_positions)
            peft.validate_legal(manager.lora_config)
            self._layouts[key] = read_layout(directory, peft, manager.modules, manager.packed_modules, self._rename)
        return self._layouts[key]

    def _free_slot(self, in_use: Collection[int]) -> int | None:
        """Return an empty slot, or else that of the adapter used longest ago of those that no request runs with."""
        manager, active = self._manager, self._manager._active_adapters
        if None not in manager.lora_index_to_id:
            idle = next((one for one in active.order if one not in in_use and one not in active.pinned_items), None)
            if idle is None:
                return None
            manager.deactivate_adapter(idle)
        return manager.lora_index_to_id.index(None)

    def _write(self, slot: int, adapter: MappedAdapter) -> None:
        """Copy an adapter into a slot that is empty.

        What the last one left there is overwritten when its matrices lay in the same places, and cleared when not.
        """
        layout = adapter.layout
        if self._written.pop(slot, None) is not layout:
            for layer in self._manager.modules.values():
                layer.reset_lora(slot)
        views = TypedViews(adapter.data.to(self._manager.device))
        known = self._targets.get((slot, layout))
        sources: list[Matrices] = []
        targets: Pairs = []
        for name, halves in layout.modules.items():
            layer, parts = self._manager.modules[name], matrices(halves, views)
            if type(layer).set_lora in _PLAIN and len(parts) == layer.n_slices:
                parts = _of_this_rank(layer, parts, is_packed=name in layout.packed)
                sources += filter(None, parts)
                targets += [] if known else _targets(layer, slot, parts)
            else:
                weights: Any = adapter.get_lora(name)
                layer.set_lora(slot, weights.lora_a, weights.lora_b)
        known = self._targets.setdefault((slot, layout), known or targets)
        torch._foreach_copy_([a for a, _ in known], [source.a for source in sources])
        for (_, b), source in zip(known, sources, strict=True):
            _copy_scaled(b, source)
        self._written[slot] = layout

    def _read_by_vllm(self, adapter_id: int) -> None:
        """Forget what a slot holds into which vLLM puts an adapter by itself."""
        if adapter_id in self._manager.lora_index_to_id:
            self._written.pop(self._manager.lora_index_to_id.index(adapter_id), None)


def _of_this_rank(layer: Any, parts: list[Matrices | None], *, is_packed: bool) -> list[Matrices | None]:
    """Cut a layer's matrices to what this worker holds of them under tensor parallelism."""
    if layer.tp_size == 1:
        return parts
    a, b = [part and part.a for part in parts], [part and part.b for part in parts]
    if is_packed:
        cut = zip(layer.slice_lora_a(a), layer.slice_lora_b(b), strict=True)
    else:
        cut = zip([layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])], strict=True)
    return [part and Matrices(*pair, part.scaling) for part, pair in zip(parts, cut, strict=True)]


def _targets(layer: Any, slot: int, parts: Sequence[Matrices | None]) -> Pairs:
    """Return where a layer's matrices go."""
    return [
        (
            layer.lora_a_stacked[i][slot, 0, : part.a.shape[0], : part.a.shape[1]],
            layer.lora_b_stacked[i][slot, 0, : part.b.shape[0], : part.b.shape[1]],
        )
        for i, part in enumerate(parts)
        if part is not None
    ]


def _copy_scaled(into: Tensor, source: Matrices) -> None:
    """Round to the slot's dtype, then scale, as vLLM does: the same bits."""
    if source.b.dtype == into.dtype:
        torch.mul(source.b, source.scaling, out=into)
    else:
        into.copy_(source.b).mul_(source.scaling)
