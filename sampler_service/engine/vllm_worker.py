"""What runs inside vLLM's worker processes, called by name over vLLM's own RPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from sampler_service.engine.vllm_internals import VllmInternals

# Imported here, in the process that loads the model, it also registers its loader with vLLM.
from sampler_service.engine.vllm_lending import write_model
from sampler_service.engine.vllm_slots import SlotWriter

Applied = tuple[float, bool]


class WorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    model_runner: Any
    reload_weights: Callable[..., None]
    """vLLM's worker's."""
    internals: VllmInternals
    slot_writer: SlotWriter | None = None

    def prepare_adapters(self, *, direct: bool) -> None:
        """Get ready for adapters, once the model is there. Raises RuntimeError when this vLLM is another one inside.

        With `direct` adapters are copied into slots from here on; without, vLLM loads them.
        """
        self.internals = VllmInternals(self.model_runner, direct=direct)
        self.slot_writer = SlotWriter(self.internals) if direct else None

    def unmatched_adapter_modules(self, modules: list[str]) -> list[str]:
        """Return those of an adapter's modules (PEFT's names) that this worker would leave out.

        vLLM loads an adapter that matches nothing without a word and then serves the base model.
        """
        packed, rename = self.internals.packed, self.internals.rename
        served = {part for name in self.internals.layers for part in packed.get(name, [name])}
        return [name for name in modules if rename(name) not in served]

    def apply_adapter(self, adapter_id: int, name: str, directory: str, *, in_memory: bool) -> Applied:
        """Make an adapter usable from the next step on; return the seconds that it took and whether it is in a slot.

        Adapters on the experts of a mixture are always loaded by vLLM, which has layouts of its own for them.
        """
        start, path, in_slot = perf_counter(), Path(directory), True
        if self.slot_writer is not None and self.slot_writer.takes(path):
            with gpu_sync_allowed():
                in_slot = self.slot_writer.add(adapter_id, path, in_memory=in_memory)
        else:
            self.model_runner.add_lora(LoRARequest(name, adapter_id, directory))
        return perf_counter() - start, in_slot

    def write_weights(self, directory: str) -> None:
        """Write the model's weights from a Hugging Face model. Raises ValueError when that is another model."""
        with gpu_sync_allowed():
            write_model(self.model_runner.get_model(), Path(directory))

    def change_model(self, directory: str) -> None:
        """Write the weights of a model of the same shape over those that are there.

        vLLM goes through the layers, lays each one's weights out as its kernels want them, and copies the result to
        where the weights were, so that graphs stay valid. Heads that share the embedding's weights are not loaded by
        themselves; on a CPU they have a packed copy of them all the same, which is made anew here.
        """
        self.reload_weights(weights_path=directory)
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)
