"""Methods added to vLLM's worker processes, called by name over vLLM's own RPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from sampler_service.engine.vllm.worker.internals import VllmInternals
from sampler_service.engine.vllm.worker.side_channel import Load, Loaded, MidStepInbox

# This import also registers the module's loader with vLLM, in the process that loads the model.
from sampler_service.engine.vllm.worker.weight_export import write_model

if TYPE_CHECKING:
    from sampler_service.engine.vllm.worker.slots import SlotWriter


class WorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    model_runner: Any
    reload_weights: Callable[..., None]
    """Method of vLLM's worker."""
    internals: VllmInternals
    slot_writer: SlotWriter | None = None
    inbox: MidStepInbox | None = None

    def prepare_adapters(self, *, direct: bool, mid_step: str) -> int:
        """Prepare for adapters once the model is loaded; return the size of this worker's slots in bytes.

        With `direct`, adapters are copied into slots from now on; otherwise vLLM loads them. If this worker can poll
        between layers, it also connects to the `side_channel` at address `mid_step`. Raises RuntimeError if this vLLM's
        internals differ.
        """
        self.internals = VllmInternals(self.model_runner, direct=direct)
        self.internals.score_prompts_by_token()
        if direct:
            # Imported only here: in a vLLM that manages adapters differently, what this module imports may not exist.
            from sampler_service.engine.vllm.worker.slots import SlotWriter  # noqa: PLC0415

            self.slot_writer = SlotWriter(self.internals)
            if self.internals.can_look_aside:
                self.inbox = MidStepInbox(mid_step, self._load_mid_step)
                self.internals.look_aside(self.inbox.look)
        return self.internals.slot_bytes

    def unmatched_adapter_modules(self, modules: list[str]) -> list[str]:
        """Return those of an adapter's modules (PEFT's names) that this worker would ignore.

        vLLM silently loads an adapter that matches nothing, and then serves the base model.
        """
        packed, rename = self.internals.packed, self.internals.rename
        served = {part for name in self.internals.layers for part in packed.get(name, [name])}
        return [name for name in modules if rename(name) not in served]

    def load_adapter(self, *values: Any) -> Loaded:
        """Make an adapter usable from the next step on; `values` are the fields of a Load.

        Adapters on a mixture's experts are always loaded by vLLM itself, which has its own layouts for them.
        """
        load, start = Load(*values), perf_counter()
        if self.inbox is not None:
            self.inbox.called(load.call)
        if self.slot_writer is not None and self.slot_writer.takes(Path(load.directory)):
            return self._write_slot(self.slot_writer, load)
        self.model_runner.add_lora(LoRARequest(load.name, load.adapter_id, load.directory))
        return Loaded(perf_counter() - start, in_slot=True)

    def _load_mid_step(self, load: Load) -> Loaded | None:
        """Load an adapter between two layers. This is safe: the step's requests do not use the slot that is written."""
        if self.slot_writer is None or not self.slot_writer.takes(Path(load.directory)):
            return None
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._write_slot(self.slot_writer, load)

    @staticmethod
    def _write_slot(writer: SlotWriter, load: Load) -> Loaded:
        start = perf_counter()
        with gpu_sync_allowed():
            in_slot = writer.add(load.adapter_id, Path(load.directory), in_memory=load.in_memory)
        return Loaded(perf_counter() - start, in_slot)

    def change_model(self, directory: str) -> None:
        """Overwrite the weights with those of a model of the same shape.

        For each layer vLLM lays the weights out as its kernels need them and copies the result into the existing
        tensors, so that graphs stay valid. Heads that share the embedding's weights are not loaded separately, but on a
        CPU they have a packed copy of them, which is made again here.
        """
        self.reload_weights(weights_path=directory)
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)

    def write_weights(self, directory: str) -> None:
        """Overwrite the weights with those of a Hugging Face model. Raises ValueError if it is a different model."""
        with gpu_sync_allowed():
            write_model(self.model_runner.get_model(), Path(directory))
