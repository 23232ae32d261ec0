"""What runs inside vLLM's worker processes, called by name over vLLM's own RPC."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    model_runner: Any

    def unmatched_adapter_modules(self, modules: list[str]) -> list[str]:
        """Return those of an adapter's modules (PEFT's names) that this worker would leave out.

        vLLM loads an adapter that matches nothing without a word and then serves the base model.
        """
        manager = self.model_runner.lora_manager._adapter_manager  # noqa: SLF001 - vLLM offers no other way
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        served: set[str] = set()
        for name in manager.modules:
            parent, dot, leaf = name.rpartition(".")
            served.update(parent + dot + part for part in manager.packed_modules_mapping.get(leaf, [leaf]))
        renamed = {name: mapper.get_rename_mapper()._map_name(name) if mapper else name for name in modules}  # noqa: SLF001
        return [name for name in modules if renamed[name] not in served]
