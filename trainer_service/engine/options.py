"""What an engine is built from. Nothing here imports torch."""

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
    """Name that clients know the base model by."""
    dtype: Dtype = "float32"
    """dtype of the base weights and of matrix products. Adapters are trained in float32 always."""
    device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    pack_tokens: int = 4096
    """Tokens that a rank's forward pass takes; a longer datum is a pass of its own. Bounds memory, not results."""
    joint_passes: bool = False
    """Whether one pass takes tokens of several runs. False makes results independent of other runs to the last bit."""
    logprob_chunk: int = 512
    """Positions whose logits exist at one time."""
    activation_checkpointing: bool = False
    """Whether each decoder layer is computed again in the backward pass instead of keeping what it computed."""
    compile: bool = False
    """Whether the element-wise parts of the fused layers are compiled (torch.compile)."""
    max_lora_rank: int = 64
    """Largest LoRA rank that is advertised."""
    adapter_dtype: Dtype | None = None
    """dtype of published adapters. None means that of the base weights."""
    staging_bytes: int = 2 << 30
    """Most memory for copies of what is being saved. A run that changes while its state finds no room there waits."""
    run_memory_bytes: int | None = None
    """What the weights, gradients and optimizer states of all runs may take. None means no limit."""
    scratch_dir: str = ""
    """Directory of the engine's own for runs that do not fit; emptied at its start. Needed with a limit."""
    failpoints: str = ""
    """Where the process dies, for tests; see trainer_service/failpoints.py."""
    base_dir: str = ""
    """Where a sampler on this machine lends its base weights; empty means that the engine loads its own."""
    ranks: int = 1
    """Processes, with a device each, that the engine consists of."""

    @property
    def base_reference(self) -> str:
        """What other tools load the base model by: its id, or the absolute path of its directory."""
        return str(Path(self.model_path).absolute()) if Path(self.model_path).is_dir() else self.model_path
