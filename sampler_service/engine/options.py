"""How a sampler works, and the options of its engine.

Imports neither torch nor vllm, so that settings can be read and checked anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Literal

EngineKind = Literal["vllm", "hf"]
BridgeKind = Literal["stream", "volume", "collective", "restart", "shared"]
Serves = Literal["adapters", "models"]
Dtype = Literal["auto", "float32", "bfloat16"]
Apply = Literal["direct", "stock"]
Outputs = Literal["direct", "stock"]
InPlace = Literal["off", "paused", "hogwild"]

NO_FLOAT32 = (
    "on GPUs vLLM computes adapters in 16 bits only, and float32 was asked for; set dtype=bfloat16 for the sampler and "
    "the trainer, or engine=hf"
)


class Weights(Enum):
    """What a sampler serves, and how its engine gets other weights."""

    ADAPTERS = auto()
    """Many adapters at once."""
    REBUILD = auto()
    """Whole models, for each of which the engine is restarted."""
    OVERWRITE = auto()
    """Whole models, each of which overwrites the one before while no request runs."""
    WRITE = auto()
    """Whole models of one run, written into the lent weights while requests run."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a sampler works."""

    engine: EngineKind
    bridge: BridgeKind
    weights: Weights

    @classmethod
    def of(cls, engine: EngineKind, bridge: BridgeKind, serves: Serves, in_place: InPlace) -> Mode:
        """Return the mode that these settings of the service mean."""
        if in_place != "off":
            return cls(engine, bridge, Weights.WRITE)
        if bridge == "restart":
            return cls(engine, bridge, Weights.REBUILD)
        return cls(engine, bridge, Weights.OVERWRITE if serves == "models" else Weights.ADAPTERS)

    @property
    def serves(self) -> Serves:
        """What is served: adapters, or whole models one at a time."""
        return "adapters" if self.weights is Weights.ADAPTERS else "models"

    @property
    def reads_volume(self) -> bool:
        """Whether versions are read from the checkpoint volume only."""
        return self.bridge in {"volume", "restart"} or self.weights is Weights.WRITE


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine, fixed for its lifetime."""

    model_path: Path
    """Directory of the base model, in Hugging Face's layout."""
    model_name: str
    """Name by which clients know the base model."""
    dtype: Dtype = "auto"
    """dtype of the base model's arithmetic; auto: the dtype of the stored weights, or 16 bits with vLLM on GPUs."""
    max_model_len: int | None = None
    """Longest sequence in tokens, prompt and completion together; None means the model's own limit."""
    max_lora_rank: int = 32
    """Largest rank of an adapter."""
    max_active_versions: int = 4
    """Adapters that one step can mix; requests for other adapters wait for a later step."""
    max_cpu_versions: int = 16
    """Adapters kept in host memory, including the active ones."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory to use; ignored on CPUs."""
    kv_cache_gib: float = 1.0
    """Size of the KV cache on CPUs in GiB; ignored on GPUs."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation: starts faster, decodes slower."""
    max_num_seqs: int = 64
    """Completions that one step can advance; further ones wait."""
    apply: Apply = "direct"
    """How vLLM gets an adapter: copied directly into its slot, or through vLLM's own loading."""
    outputs: Outputs = "direct"
    """How tokens leave vLLM: taken from its engine process directly, or by vLLM's own conversion and generators."""
    tool_parser: str = ""
    """vLLM's parser for the model's tool calls, for OpenAI's API; empty means that requests with tools are refused."""
    reasoning_parser: str = ""
    """vLLM's parser for the reasoning before an answer; empty means that it is part of the text."""
    base_dir: Path | None = None
    """Directory through which the base weights are lent to a trainer on the same machine; None: they are not lent."""
    in_place: InPlace = "off"
    """Whether the lent weights may be written while the engine serves, and whether it pauses for that."""

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
