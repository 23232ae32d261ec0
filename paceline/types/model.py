"""Models: which weights to use, and what services report about them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.types.reprs import ShortRepr


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The weights to use: the base model (all fields empty), a run's version, or a sampler checkpoint."""

    base: str = ""
    """Name of the base model; empty means the served one."""
    run_id: str = ""
    """The run that published the version."""
    version: int | None = None
    """Version number; None means the newest published version."""
    checkpoint: str = ""
    """Path of a sampler checkpoint: paceline://<run_id>/sampler/<name>."""

    @property
    def is_base(self) -> bool:
        """Whether this refers to the base model alone."""
        return not self.run_id and not self.checkpoint

    def __str__(self) -> str:
        if self.checkpoint:
            return self.checkpoint
        return f"{self.run_id}@{self.version or 'newest'}" if self.run_id else (self.base or "base")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The weights that produced an answer."""

    base_model: str
    """Name of the base model."""
    run_id: str = ""
    """Run of the version; empty for the base model and checkpoints."""
    version: int = 0
    """Version number; 0 for the base model and for checkpoints."""
    checkpoint: str = ""
    """Path of the checkpoint; empty otherwise."""
    blake3: str = ""
    """BLAKE3-256 of the weights' safetensors file, lower-case hex; empty for the base model."""


class PackingMode(Enum):
    """How the trainer's engine computes sequences with a base model. The values are those on the wire."""

    PACKED = 1
    """Many sequences share a pass, including sequences of different runs."""
    ONE_SEQUENCE = 2
    """One sequence per pass: correct, but slower. Runs take turns."""


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The modules that one of LoraConfig's groups selects in a base model."""

    name: str
    """Field of LoraConfig: train_attn, train_mlp or train_unembed."""
    modules: tuple[str, ...] = ()
    """Last name components of the modules that get an adapter; empty if the model has no suitable ones."""
    refusal: str = ""
    """Why a run with this group in all layers is refused; empty if it is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCertificate:
    """The startup check of the trainer's engine: random tokens, computed as for runs and by stock transformers."""

    packing: PackingMode
    """How sequences are computed together."""
    attention: str
    """Name of the attention implementation: paceline_packed, or one of transformers' own."""
    reason: str = ""
    """Why sequences do not share passes; empty if they do."""
    tokens: int
    """Number of tokens compared."""
    logprob_difference: float
    """Root mean square of the differences between log-probabilities."""
    logprob_bound: float
    """Upper bound of `logprob_difference`: the effect of rounding in the engine's dtype on this model."""
    gradient_difference: float
    """Norm of the difference between gradients, divided by the norm of the gradient."""
    gradient_bound: float
    """Largest difference that is allowed for gradients."""
    seconds: float
    """Duration of the check."""
    groups: tuple[AdapterGroup, ...] = ()
    """What can have an adapter, and what cannot."""


@dataclass(frozen=True, slots=True, repr=False)
class ModelInfo(ShortRepr):
    """A base model as a service describes it."""

    name: str
    """Name, as `base_model` takes it."""
    max_context_length: int
    """Longest sequence in tokens."""
    vocab_size: int
    """Number of token ids."""
    dtype: str
    """dtype of the base weights: float32, bfloat16 or float16."""
    max_lora_rank: int
    """Largest rank of an adapter."""
    num_layers: int
    """Number of layers."""
    certificate: ModelCertificate | None = None
    """Result of the trainer's startup check; None from samplers."""
    weights_sha256: str = ""
    """Identity of the base weights, independent of how they are split into files; empty if unknown."""
    unserved_modules: tuple[str, ...] = ()
    """Full names of the linear modules on which the sampler serves no adapter; empty from the trainer."""
