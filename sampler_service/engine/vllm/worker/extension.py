"""What runs inside vLLM's worker processes, called by name over vLLM's own RPC."""

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

# Imported here, in the process that loads the model, it also registers its loader with vLLM.
from sampler_service.engine.vllm.worker.weight_export import write_model

if TYPE_CHECKING:
    from sampler_service.engine.vllm.worker.slots import SlotWriter


class WorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    model_runner: Any
    reload_weights: Callable[..., None]
    """vLLM's worker's."""
    internals: VllmInternals
    slot_writer: SlotWriter | None = None
    inbox: MidStepInbox | None = None

    def prepare_adapters(self, *, direct: bool, mid_step: str) -> int:
        """Get ready for adapters, once the model is there; return the bytes of this worker's slots.

        Raises RuntimeError when this vLLM is another one inside.

        With `direct` adapters are copied into slots from here on; without, vLLM loads them. Where this worker can look
        aside between layers it listens at the `side_channel`, too.
        """
        self.internals = VllmInternals(self.model_runner, direct=direct)
        self.internals.score_prompts_by_token()
        if direct:
            # Not imported otherwise: of a vLLM that keeps adapters in another way its parts may be gone.
            from sampler_service.engine.vllm.worker.slots import SlotWriter  # noqa: PLC0415

            self.slot_writer = SlotWriter(self.internals)
            if self.internals.can_look_aside:
                self.inbox = MidStepInbox(mid_step, self._load_mid_step)
                self.internals.look_aside(self.inbox.look)
        return self.internals.slot_bytes

    def unmatched_adapter_modules(self, modules: list[str]) -> list[str]:
        """Return those of an adapter's modules (PEFT's names) that this worker would leave out.

        vLLM loads an adapter that matches nothing without a word and then serves the base model.
        """
        packed, rename = self.internals.packed, self.internals.rename
        served = {part for name in self.internals.layers for part in packed.get(name, [name])}
        return [name for name in modules if rename(name) not in served]

    def load_adapter(self, *values: Any) -> Loaded:
        """Make an adapter usable from the next step on; `values` are those of a Load.

        Adapters on the experts of a mixture are always loaded by vLLM, which has layouts of its own for them.
        """
        load, start = Load(*values), perf_counter()
        if self.inbox is not None:
            self.inbox.called(load.call)
        if self.slot_writer is not None and self.slot_writer.takes(Path(load.directory)):
            return self._write_slot(self.slot_writer, load)
        self.model_runner.add_lora(LoRARequest(load.name, load.adapter_id, load.directory))
        return Loaded(perf_counter() - start, in_slot=True)

    def _load_mid_step(self, load: Load) -> Loaded | None:
        """Load an adapter between two layers: the step's requests use other slots than the one that is written."""
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
        """Write the weights of a model of the same shape over those that are there.

        vLLM goes through the layers, lays each one's weights out as its kernels want them, and copies the result to
        where the weights were, so that graphs stay valid. Heads that share the embedding's weights are not loaded by
        themselves; on a CPU they have a packed copy of them all the same, which is made anew here.
        """
        self.reload_weights(weights_path=directory)
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)

    def write_weights(self, directory: str) -> None:
        """Write the model's weights from a Hugging Face model. Raises ValueError when that is another model."""
        with gpu_sync_allowed():
            write_model(self.model_runner.get_model(), Path(directory))
