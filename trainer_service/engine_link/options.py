"""Settings of a trainer engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of a trainer engine; fixed for its lifetime."""

    model_path: str
    """Directory of a Hugging Face model, or its id."""
    model_name: str
    """Name of the base model for clients."""
    dtype: Dtype = "float32"
    """dtype of the base weights and of matrix products. Adapters are always trained in float32."""
    device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    pack_tokens: int = 4096
    """Most tokens in a rank's forward pass; a longer datum gets its own pass. Limits memory, not results."""
    joint_passes: bool = False
    """Whether a pass may contain tokens of several runs. False makes results independent of other runs, bit for bit."""
    logprob_chunk: int = 512
    """Number of positions whose logits exist at the same time."""
    activation_checkpointing: bool = False
    """Whether the backward pass recomputes each decoder layer instead of keeping its activations."""
    compile: bool = False
    """Whether the element-wise parts of the fused layers are compiled (torch.compile)."""
    max_lora_rank: int = 64
    """Largest advertised LoRA rank."""
    adapter_dtype: Dtype | None = None
    """dtype of published adapters. None means that of the base weights."""
    staging_bytes: int = 2 << 30
    """Memory limit for copies of states being saved. A run whose copy does not fit can change only after the write."""
    run_memory_bytes: int | None = None
    """Memory limit for the weights, gradients and optimizer states of all runs. None means no limit."""
    scratch_dir: str = ""
    """The engine's own directory for runs that do not fit in memory; emptied at its start. Required with a limit."""
    failpoints: str = ""
    """Points at which the process dies, for tests; see trainer_service/failpoints.py."""
    base_dir: str = ""
    """Directory in which a sampler on this machine lends its base weights; if empty, the engine loads its own."""
    ranks: int = 1
    """Number of processes that make up the engine, each with its own device."""

    @property
    def base_reference(self) -> str:
        """The base model's id, or the absolute path of its directory, by which other tools load it."""
        return str(Path(self.model_path).absolute()) if Path(self.model_path).is_dir() else self.model_path
