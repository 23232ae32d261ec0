"""What a tenant owns: runs, checkpoints, and quotas on resources."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from paceline.types.reprs import ShortRepr
from paceline.types.training import RunParameters


class RunState(Enum):
    """Whether a run can execute commands. The values are those on the wire."""

    READY = 1
    LOST = 2
    """The run's state cannot be rebuilt from its journal; only loading a checkpoint is possible."""


class CheckpointKind(Enum):
    """The content of a checkpoint. The values are those on the wire."""

    STATE = 1
    """Weights, optimizer, RNG, step, pending gradient."""
    SAMPLER = 2
    """Weights in PEFT's layout, or a whole Hugging Face model for a full-parameter run."""

    @property
    def folder(self) -> str:
        """The kind's name in paths."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, repr=False)
class Run(ShortRepr):
    """A training run."""

    run_id: str
    """Its id, made by the service: run- and 32 hex digits."""
    base_model: str
    """Name of the base model."""
    parameters: RunParameters
    """The parameters that the run trains."""
    step: int
    """Optimizer steps taken by the commands up to `executed_seq_id`."""
    last_seq_id: int
    """Highest seq_id accepted in order."""
    latest_version: int
    """Newest published version; 0 if none."""
    state: RunState
    """Whether it can execute commands."""
    latest_state_checkpoint: str
    """Path; empty if none."""
    create_time: datetime
    """When it was made."""
    trainable_parameters: int
    """Number of weights that it trains."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    """What its client said of it, such as its name."""
    adapted_modules: tuple[str, ...] = ()
    """Full names of the modules that have an adapter; empty for a full-parameter run."""
    damage: tuple[str, ...] = ()
    """Files and directories that were found damaged on the volume and set aside, as paths in the run's folder."""
    executed_seq_id: int = 0
    """Highest seq_id whose command has executed; those after it, up to `last_seq_id`, are accepted and will execute."""
    gradient_tokens: int = 0
    """Counted positions of the gradient that waits for an optimizer step after that command; 0 if none waits."""
    volume_bytes: int = 0
    """Bytes that it has on the checkpoint volume."""
    last_use_time: datetime | None = None
    """When a command of it arrived last, or a client attached; up to a minute earlier after a kill."""


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint(ShortRepr):
    """A durable, named copy of a run's weights or state."""

    path: str
    """paceline://<run_id>/<kind>/<name>."""
    run_id: str
    """Run that it was made from."""
    kind: CheckpointKind
    """What it holds."""
    name: str
    """Last part of its path."""
    step: int
    """Optimizer steps that the run had taken."""
    size_bytes: int
    """Bytes of its files."""
    sha256: str
    """SHA-256 of the weights' safetensors file, as `sha256sum` prints it."""
    blake3: str
    """BLAKE3-256 of the same file, as in the `ServedModel` of what is sampled from it."""
    create_time: datetime
    """When it was made."""
    expire_time: datetime | None = None
    """When it is deleted automatically; None means never."""
    damage: str = ""
    """Why the checkpoint is damaged and cannot be loaded; empty if its manifest can be read."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How much of a resource a tenant uses, and its limit."""

    name: str
    """Such as runs or volume_bytes; docs/operations.md lists them."""
    used: int
    """How much of it the tenant uses."""
    limit: int
    """0 means no limit."""
