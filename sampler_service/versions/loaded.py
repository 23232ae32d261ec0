"""What a sampler holds, and what a request holds of it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.layout import CheckpointPath
from paceline.types import ServedModel
from sampler_service.engine.base import Adapter, LoadTimes
from sampler_service.versions.bridges import StagedAdapter


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """An adapter that the engine holds."""

    served: ServedModel
    tenant: str
    adapter: Adapter
    staged: StagedAdapter
    times: LoadTimes
    requests_in_flight: int = 0
    retired: bool = False
    """Whether it goes when its last request ends."""

    @property
    def size_bytes(self) -> int:
        """Length of its safetensors file."""
        return self.staged.manifest.total_size


@dataclass(frozen=True, slots=True)
class Lease:
    """Weights that stay loaded while a request uses them."""

    served: ServedModel
    adapter: Adapter | None = None
    """None for the base model."""
    load_milliseconds: float = 0.0
    """What loading took; 0 when the weights were there."""


def run_of(served: ServedModel) -> str:
    """Return the run that weights come from."""
    return CheckpointPath.parse(served.checkpoint).run_id if served.checkpoint else served.run_id
