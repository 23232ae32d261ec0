"""Runs and their durable snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from paceline.types.training import RunParameters


class RunState(Enum):
    """Whether a run can execute commands. The values are those of the wire."""

    READY = 1
    LOST = 2
    """The run's state cannot be rebuilt from its journal; only loading a checkpoint executes."""


class CheckpointKind(Enum):
    """What a checkpoint holds. The values are those of the wire."""

    STATE = 1
    """Weights, optimizer, RNG, step, pending gradient."""
    SAMPLER = 2
    """Weights in PEFT's layout, or of a full-parameter run a whole Hugging Face model."""

    @property
    def folder(self) -> str:
        """The kind's name in paths."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Run:
    """A training run."""

    run_id: str
    base_model: str
    parameters: RunParameters
    """What it trains."""
    step: int
    """Optimizer steps taken."""
    last_seq_id: int
    """Highest seq_id executed."""
    latest_version: int
    """Newest published version; 0 means none."""
    state: RunState
    latest_state_checkpoint: str
    """Path; empty means none."""
    create_time: datetime
    trainable_parameters: int
    user_metadata: dict[str, str] = field(default_factory=dict)
    adapted_modules: tuple[str, ...] = ()
    """Full names of the modules that have an adapter; empty for a full-parameter run."""
    damage: tuple[str, ...] = ()
    """What was found damaged on the volume and set aside, by its name in the run's folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable, named snapshot."""

    path: str
    """paceline://<run_id>/<kind>/<name>."""
    run_id: str
    kind: CheckpointKind
    name: str
    step: int
    size_bytes: int
    sha256: str
    """Of the weights' safetensors file."""
    create_time: datetime
    expire_time: datetime | None = None
    """When it is deleted by itself; None means never."""
    damage: str = ""
    """What is damaged, so that it cannot be loaded; empty when its manifest can be read."""
