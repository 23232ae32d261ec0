"""Offers a lost run's newest intact snapshot as a state checkpoint, from which the run can continue."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from paceline import errors, layout, weights
from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.types import CheckpointKind
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.journal.snapshots import OWN_FILES, Snapshot
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry

_log = get_logger(__name__)


class RestorePoints:
    """Offers the snapshots of lost runs as checkpoints."""

    def __init__(self, volume: layout.Volume, registry: RunRegistry, checkpoints: CheckpointStore) -> None:
        self._volume = volume
        self._registry = registry
        self._checkpoints = checkpoints

    async def offer(self, run: RunRecord) -> None:
        """Convert a run's newest snapshot to a checkpoint, unless its newest state checkpoint is at least as recent."""
        try:
            snapshot = await asyncio.to_thread(run.snapshots.newest)
            if snapshot is None or snapshot.seq_id <= self._seq_id_of_checkpoint(run):
                return
            run.latest_state_checkpoint = await self._make(run, snapshot)
            await self._registry.persist(run)
        except (errors.PacelineError, OSError) as error:
            _log.warning("a lost run's snapshot is not offered as a checkpoint", run=run.run_id, error=str(error))

    async def _make(self, run: RunRecord, snapshot: Snapshot) -> str:
        async def write(staging: Path) -> None:
            await asyncio.to_thread(_copy_state, snapshot.directory, staging)

        path = CheckpointPath(run.run_id, CheckpointKind.STATE, f"restored-{snapshot.seq_id}")
        made = await self._checkpoints.save(
            path,
            write,
            base_model=run.base_model,
            base_sha256=run.base_sha256,
            tenant=run.tenant,
            step=snapshot.facts.step,
            seq_id=snapshot.seq_id,
            ttl_seconds=None,
            overwrite=False,
        )
        _log.warning("a lost run's newest snapshot is offered as a checkpoint", run=run.run_id, path=made.path)
        return made.path

    def _seq_id_of_checkpoint(self, run: RunRecord) -> int:
        """Return the seq_id recorded in the run's newest state checkpoint; -1 if there is none or it is damaged."""
        if not run.latest_state_checkpoint:
            return -1
        directory = self._volume.checkpoint(CheckpointPath.parse(run.latest_state_checkpoint))
        try:
            return int(weights.read_manifest(directory).seq_id)
        except (FileNotFoundError, errors.ChecksumMismatch):
            return -1


def _copy_state(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.name not in OWN_FILES:
            shutil.copyfile(path, target / path.name)
