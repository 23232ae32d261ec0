"""What runs inside vLLM's worker processes, called by name over vLLM's own RPC."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from sampler_service.engine.vllm_slots import SlotWriter

Applied = tuple[float, bool]


class WorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    model_runner: Any

    def unmatched_adapter_modules(self, modules: list[str]) -> list[str]:
        """Return those of an adapter's modules (PEFT's names) that this worker would leave out.

        vLLM loads an adapter that matches nothing without a word and then serves the base model.
        """
        return self.slot_writer.unmatched(modules)

    def apply_adapter(self, adapter_id: int, name: str, directory: str, *, direct: bool, in_memory: bool) -> Applied:
        """Make an adapter usable from the next step on; return the seconds that it took and whether it is in a slot.

        With `direct` it is copied into a slot, if one is free of running requests. Adapters on the experts of a mixture
        are loaded by vLLM all the same, which has layouts of its own for them.
        """
        start, path, in_slot = perf_counter(), Path(directory), True
        if direct and self.slot_writer.takes(path):
            with gpu_sync_allowed():
                in_slot = self.slot_writer.add(adapter_id, path, self._adapters_in_use(), in_memory=in_memory)
        else:
            self.model_runner.add_lora(LoRARequest(name, adapter_id, directory))
        return perf_counter() - start, in_slot

    @cached_property
    def slot_writer(self) -> SlotWriter:
        """Made when first asked for, since the model is not there before."""
        manager = self.model_runner.lora_manager
        return SlotWriter(manager._adapter_manager, manager.max_position_embeddings)  # noqa: SLF001

    def _adapters_in_use(self) -> set[int]:
        """Ids of the adapters of requests that are in the batch."""
        if hasattr(self.model_runner, "lora_state"):
            return {request.lora_int_id for request in self.model_runner.lora_state.lora_requests.values()}
        return set(self.model_runner.input_batch.lora_id_to_lora_request)
