"""What a caller sees of a deployment: services, models, versions that samplers hold, commands that wait, disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from paceline.types.resources import Quota


@dataclass(frozen=True, slots=True)
class Service:
    """A service."""

    kind: str
    sampler_id: str
    reachable: bool
    version: str
    start_time: datetime | None
    memory_bytes: int
    machine_available_bytes: int
    machine_total_bytes: int
    unused_because: str


@dataclass(frozen=True, slots=True)
class Model:
    """A base model."""

    name: str
    certificate: str
    """packed, one_sequence, or empty if the trainer does not answer."""
    trainable: bool
    sampleable: bool


@dataclass(frozen=True, slots=True)
class Held:
    """A version that a watching sampler holds."""

    sampler_id: str
    run_id: str
    run_name: str
    version: int
    newest: bool
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """A command that has not ended."""

    run_id: str
    run_name: str
    seq_id: int
    state: str
    commands_ahead: int
    executing_seconds: float


@dataclass(frozen=True, slots=True)
class Disk:
    """The checkpoint volume."""

    free_bytes: int
    total_bytes: int
    used_bytes: int
    """Those of the caller's tenant."""
    limit_bytes: int
    """The most that the tenant may have; 0 means no limit."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a caller sees of a deployment."""

    address: str
    tenant: str
    services: Sequence[Service]
    models: Sequence[Model]
    watching: Sequence[str]
    """Ids of the samplers that watch the trainer."""
    versions: Sequence[Held]
    queue: Sequence[Waiting]
    disk: Disk | None
    quotas: Sequence[Quota]
    trainer_error: str
    """Why the trainer's part is missing; empty if it is not."""
