"""Methods added to vLLM's worker processes, called by name over vLLM's own RPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from paceline.layout import WEIGHTS_FILE
from sampler_service.engine.vllm.worker.internals import VllmInternals
from sampler_service.engine.vllm.worker.prompt_logits import score_prompts_by_token

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

    def prepare_adapters(self, *, direct: bool) -> int:
        """Prepare for adapters once the model is loaded; return the size of this worker's slots in bytes.

        With `direct`, adapters are copied into slots from now on; otherwise vLLM loads them. Raises RuntimeError if
        this vLLM's internals differ.
        """
        self.internals = VllmInternals(self.model_runner, direct=direct)
        score_prompts_by_token(self.model_runner, self.internals.layers.values())
        if direct:
            # Imported only here: in a vLLM that manages adapters differently, what this module imports may not exist.
            from sampler_service.engine.vllm.worker.slots import SlotWriter  # noqa: PLC0415

            self.slot_writer = SlotWriter(self.internals)
        return self.internals.slot_bytes

    def unmatched_adapter_modules(self, modules: list[str]) -> list[str]:
        """Return those of an adapter's modules (PEFT's names) that this worker would ignore.

        vLLM silently loads an adapter that matches nothing, and then serves the base model.
        """
        packed, rename = self.internals.packed, self.internals.rename
        served = {part for name in self.internals.layers for part in packed.get(name, [name])}
        return [name for name in modules if rename(name) not in served]

    def load_adapter(self, adapter_id: int, name: str, directory: str, in_memory: bool) -> tuple[float, bool] | None:
        """Make an adapter usable from the next step on; return the seconds that took, and whether it is in a slot.

        Return None if its files were removed; vLLM would log a traceback of an exception, and pass on only its text.
        Adapters on a mixture's experts are always loaded by vLLM itself, which has its own layouts for them.
        """
        try:
            return self._load_adapter(adapter_id, name, Path(directory), in_memory=in_memory)
        except Exception:
            if (Path(directory) / WEIGHTS_FILE).exists():
                raise
            return None

    def _load_adapter(self, adapter_id: int, name: str, directory: Path, *, in_memory: bool) -> tuple[float, bool]:
        start, in_slot = perf_counter(), None
        if self.slot_writer is not None:
            with gpu_sync_allowed():
                in_slot = self.slot_writer.add(adapter_id, directory, in_memory=in_memory)
        if in_slot is None:
            self.model_runner.add_lora(LoRARequest(name, adapter_id, str(directory)))
            in_slot = True
        return perf_counter() - start, in_slot

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
