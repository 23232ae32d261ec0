"""Names of weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


class PackingMode(Enum):
    """How a base model's sequences go through the trainer's engine. The values are those of the wire."""

    PACKED = 1
    """Many sequences share a pass, of several runs too."""
    ONE_SEQUENCE = 2
    """One sequence is a pass: right, and slower. Runs take turns."""


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """Modules that one of LoraConfig's groups stands for in a base model."""

    name: str
    """Field of LoraConfig: train_attn, train_mlp or train_unembed."""
    modules: tuple[str, ...] = ()
    """Last names of the modules that get an adapter; empty if the model has none that could."""
    refusal: str = ""
    """Why a run with this group in all layers is refused; empty if it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCertificate:
    """What the trainer's engine measured at load: random tokens by stock transformers, and as runs are computed."""

    packing: PackingMode
    attention: str
    """Name of the attention implementation: paceline_packed, or one of transformers' own."""
    reason: str = ""
    """Why sequences do not share passes; empty if they do."""
    tokens: int
    """Tokens that were compared."""
    logprob_difference: float
    """Root mean square of the differences between log-probabilities."""
    logprob_bound: float
    """What it may be: what rounding in the engine's dtype does to this model."""
    gradient_difference: float
    """Norm of the difference between gradients, by the norm of the gradient."""
    gradient_bound: float
    seconds: float
    """Time that the check took."""
    groups: tuple[AdapterGroup, ...] = ()


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
    certificate: ModelCertificate | None = None
    """What the trainer's engine found when it loaded the model; None at samplers."""
    weights_sha256: str = ""
    """Identity of the base weights, the same however they are cut into files; empty where it is not known."""
