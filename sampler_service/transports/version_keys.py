"""Keys that identify sets of weights on this sampler."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import errors
from paceline.types import ModelRef, ServedModel


@dataclass(frozen=True, slots=True)
class VersionKey:
    """One immutable set of weights: a version of a run, or one content of a checkpoint."""

    run_id: str = ""
    version: int = 0
    checkpoint: str = ""
    sha256: str = ""
    """Set for checkpoints only: their path can be overwritten, so the content is part of the key."""

    @classmethod
    def of(cls, model: ServedModel) -> VersionKey:
        """Return the key of a served model."""
        if model.checkpoint:
            return cls(checkpoint=model.checkpoint, sha256=model.sha256)
        return cls(run_id=model.run_id, version=model.version)

    def ref(self) -> ModelRef:
        """Return a reference to these weights."""
        if self.checkpoint:
            return ModelRef(checkpoint=self.checkpoint)
        return ModelRef(run_id=self.run_id, version=self.version)


def absent(ref: ModelRef) -> errors.NotFound:
    """Return the error for weights that do not exist."""
    if ref.checkpoint:
        return errors.CheckpointNotFound("no such checkpoint", field="model.checkpoint")
    return errors.VersionNotFound("no such version, or no longer kept", field="model.version.version")


def foreign(ref: ModelRef) -> errors.NotFound:
    """Return the error for another tenant's weights: the same as for a run or a checkpoint that does not exist."""
    if ref.checkpoint:
        return absent(ref)
    return errors.RunNotFound("no such run", field="model.version.run_id")
