"""How to set an engine up. Free of torch and vllm, so that settings can be read and checked anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16"]
Apply = Literal["direct", "stock"]
Outputs = Literal["direct", "stock"]
InPlace = Literal["off", "paused", "hogwild"]


NO_FLOAT32 = (
    "on GPUs vLLM computes adapters in 16 bits only, and float32 was asked for; set dtype=bfloat16 for the sampler and "
    "the trainer, or engine=hf"
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine; fixed for the engine's life."""

    model_path: Path
    """Directory of the base model, in the layout of Hugging Face."""
    model_name: str
    """Name by which clients know the base model."""
    dtype: Dtype = "auto"
    """dtype of the base model's arithmetic; auto takes the one that the weights are stored in, vLLM on GPUs 16 bits."""
    max_model_len: int | None = None
    """Longest sequence in tokens, prompt and completion together. None means what the model was made for."""
    max_lora_rank: int = 32
    """Largest rank of an adapter."""
    max_active_versions: int = 4
    """Adapters that one step can mix; requests for others wait for a later step."""
    max_cpu_versions: int = 16
    """Adapters kept in host memory, the active ones included."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory to take; unused on CPU."""
    kv_cache_gib: float = 1.0
    """Size of the KV cache on CPU in GiB; unused on GPU."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enforce_eager: bool = False
    """Run without CUDA graphs and without compilation: starts faster, decodes slower."""
    max_num_seqs: int = 64
    """Completions that one step can advance; others wait."""
    apply: Apply = "direct"
    """How vLLM gets an adapter: copied straight into its slot, or by vLLM's own loading."""
    outputs: Outputs = "direct"
    """How tokens leave vLLM: taken where it hands them over, or by vLLM's own conversion and generators."""
    tool_parser: str = ""
    """vLLM's parser of the model's tool calls, for OpenAI's API; empty means that requests may have no tools."""
    base_dir: Path | None = None
    """Directory where the base weights are lent to a trainer on the same machine; None means that they are not."""
    in_place: InPlace = "off"
    """Whether the lent weights may be written while the engine serves, and whether it pauses meanwhile."""

    def __post_init__(self) -> None:
        counts = {
            "max_lora_rank": self.max_lora_rank,
            "max_active_versions": self.max_active_versions,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "max_num_seqs": self.max_num_seqs,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if self.base_dir is not None and self.tensor_parallel_size * self.pipeline_parallel_size > 1:
            raise ValueError("base weights are lent whole; with bridge=shared the parallel sizes are 1")
        if self.max_cpu_versions < self.max_active_versions:
            raise ValueError(f"max_cpu_versions is {self.max_cpu_versions}; give at least max_active_versions")
