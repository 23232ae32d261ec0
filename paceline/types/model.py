"""Names of weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The weights to use: the base model (all fields empty), a run's version, or a sampler checkpoint."""

    base: str = ""
    """Name of the base model; empty means the one that is served."""
    run_id: str = ""
    """The run whose version is meant."""
    version: int | None = None
    """Version number; None means the newest published one."""
    checkpoint: str = ""
    """Path of a sampler checkpoint: paceline://<run_id>/sampler/<name>."""

    @property
    def is_base(self) -> bool:
        """Whether the base model alone is meant."""
        return not self.run_id and not self.checkpoint

    def __str__(self) -> str:
        if self.checkpoint:
            return self.checkpoint
        return f"{self.run_id}@{self.version or 'newest'}" if self.run_id else (self.base or "base")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The weights that produced an answer."""

    base_model: str
    run_id: str = ""
    version: int = 0
    """Version number; 0 for the base model and for checkpoints."""
    checkpoint: str = ""
    sha256: str = ""
    """SHA-256 of the adapter's safetensors file; empty for the base model."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a service knows of a base model."""

    name: str
    max_context_length: int
    """Longest sequence in tokens."""
    vocab_size: int
    dtype: str
    """dtype of the base weights: float32, bfloat16 or float16."""
    max_lora_rank: int
    num_layers: int
