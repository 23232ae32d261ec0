"""Access to the private state of a vLLM worker's LoRA manager, checked when the engine starts.

vLLM has no public interface for adding an adapter that it does not read from a directory itself. This module relies on
how its LoRA manager tracks adapters and slots. If a vLLM version does that differently, the engine does not start.
"""

# ruff: noqa: SLF001 - all uses of private names are collected here

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from sampler_service.engine.protocol import EngineUnfit

_MANAGER = "lora_manager._adapter_manager"
ALWAYS_USED = (f"{_MANAGER}.model", f"{_MANAGER}.modules", f"{_MANAGER}.packed_modules")
USED_BY_DIRECT_WRITES = (
    "lora_manager.max_position_embeddings",
    f"{_MANAGER}.capacity",
    f"{_MANAGER}.device",
    f"{_MANAGER}.lora_config.lora_dtype",
    f"{_MANAGER}.lora_index_to_id",
    f"{_MANAGER}._registered_adapters",
    f"{_MANAGER}._active_adapters.order",
    f"{_MANAGER}._active_adapters.pinned_items",
    f"{_MANAGER}.deactivate_adapter",
    f"{_MANAGER}.remove_oldest_adapter",
    f"{_MANAGER}._last_slot_layout",
)
"""The last one shows that vLLM detects a slot that gets another adapter between two steps of the same requests."""
RUNNING_ADAPTERS = ("lora_state.lora_requests", "input_batch.lora_id_to_lora_request")
"""Where vLLM's two model runners keep the adapters of requests in the batch; one of the two must exist."""

PROMPT_SCORING = ("_get_prompt_logprobs_dict", "prompt_logprobs_worker.compute_prompt_logprobs")
"""Where the two model runners score prompts; one of the two must exist."""


class VllmInternals:
    """One worker's adapters and slots, as vLLM tracks them. Use it only in the worker's own thread."""

    def __init__(self, model_runner: Any, *, direct: bool) -> None:
        """Check for the attributes in use; `direct` adds those for slots. Raises EngineUnfit if any are missing."""
        used = ALWAYS_USED + USED_BY_DIRECT_WRITES if direct else ALWAYS_USED
        missing = [path for path in used if not _has(model_runner, path)]
        for either in (RUNNING_ADAPTERS, PROMPT_SCORING) if direct else (PROMPT_SCORING,):
            missing += [] if any(_has(model_runner, path) for path in either) else [" or ".join(either)]
        if missing:
            raise EngineUnfit(
                f"vLLM {vllm.__version__} manages adapters in an unknown way: its model runner has no "
                f"{', '.join(missing)}; install the version that requirements/ pins, or, where that helps, set "
                "PACELINE_SAMPLER_APPLY=stock"
            )
        self._runner = model_runner
        self._manager = model_runner.lora_manager._adapter_manager
        self.layers: Mapping[str, Any] = self._manager.modules
        """Layers that can have adapters, by vLLM's name."""
        self.packed: Mapping[str, Sequence[str]] = self._manager.packed_modules
        """The names of the modules that vLLM packed into a layer, by the layer's name."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        self.rename: Callable[[str], str] = mapper.get_rename_mapper()._map_name if mapper else str
        """Function that maps Hugging Face's name of a module to vLLM's."""

    @property
    def slot_bytes(self) -> int:
        """Size of the memory that holds the slots' matrices in all layers, in bytes."""
        names = ("lora_a_stacked", "lora_b_stacked")
        stacks = [getattr(layer, name, ()) for layer in self.layers.values() for name in names]
        storages = [one.untyped_storage() for stack in stacks for one in stack if isinstance(one, torch.Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def device(self) -> torch.device:
        """Device of the slots."""
        return torch.device(self._manager.device)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the slots."""
        dtype: torch.dtype = self._manager.lora_config.lora_dtype
        return dtype

    def read_config(self, directory: Path) -> PEFTHelper:
        """Read an adapter's configuration as vLLM does. Raises ValueError if vLLM does not support such adapters."""
        peft = PEFTHelper.from_local_dir(str(directory), self._runner.lora_manager.max_position_embeddings)
        peft.validate_legal(self._manager.lora_config)
        return peft

    def holds(self, adapter_id: int) -> bool:
        """Return whether this worker has an adapter, in a slot or not."""
        return adapter_id in self._manager._registered_adapters

    def empty_a_slot(self) -> int | None:
        """Return an empty slot, evicting the least recently used idle adapter if needed; None if all are in use."""
        manager, active = self._manager, self._manager._active_adapters
        if None not in manager.lora_index_to_id:
            running = self._running()
            idle = next((one for one in active.order if one not in running and one not in active.pinned_items), None)
            if idle is None:
                return None
            manager.deactivate_adapter(idle)
        slot: int = manager.lora_index_to_id.index(None)
        return slot

    def register(self, adapter: LoRAModel, slot: int | None) -> None:
        """Register an adapter with vLLM, in its slot; with None, vLLM puts it into one when it first needs it."""
        manager = self._manager
        if len(manager._registered_adapters) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager._registered_adapters[adapter.id] = adapter
        if slot is not None:
            manager._active_adapters[adapter.id] = None
            manager.lora_index_to_id[slot] = adapter.id

    def _running(self) -> set[int]:
        """Return the ids of adapters used by requests in the batch."""
        if hasattr(self._runner, "lora_state"):
            return {request.lora_int_id for request in self._runner.lora_state.lora_requests.values()}
        return set(self._runner.input_batch.lora_id_to_lora_request)


def _has(thing: object, path: str) -> bool:
    try:
        attrgetter(path)(thing)
    except AttributeError:
        return False
    return True
