"""All runs of this trainer."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline import errors, layout
from paceline.log import get_logger
from paceline.rpc.identity import Identity
from paceline.types import RunState
from trainer_service.runs.record import RunRecord

RUN_FILE = "run.json"

_log = get_logger(__name__)


class RunRegistry:
    """Finds runs for their owners, and keeps on the volume what must survive."""

    def __init__(self, volume: layout.Volume, gap_wait_seconds: float) -> None:
        self._volume = volume
        self._gap_wait = gap_wait_seconds
        self._runs: dict[str, RunRecord] = {}

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(list(self._runs.values()))

    def restore(self) -> None:
        """Read every run from the volume; their weights in memory are gone."""
        self._volume.runs.mkdir(parents=True, exist_ok=True)
        for file in sorted(self._volume.runs.glob(f"*/{RUN_FILE}")):
            record = RunRecord.from_json(file.read_bytes(), self._gap_wait)
            self._runs[record.run_id] = record
            for folder in (file.parent, *_kind_folders(file.parent)):
                layout.sweep(folder)
        _log.info("runs restored", runs=len(self._runs))

    def get(self, run_id: str, identity: Identity) -> RunRecord:
        """Return the caller's run. Raises RunNotFound, also for another tenant's."""
        record = self._runs.get(layout.check_run_id(run_id))
        if record is None or not (identity.is_peer or record.tenant == identity.tenant):
            raise errors.RunNotFound("no such run", field="run_id")
        return record

    def owned_by(self, identity: Identity) -> list[RunRecord]:
        """Return the caller's runs."""
        return [record for record in self._runs.values() if identity.is_peer or record.tenant == identity.tenant]

    def find_request(self, tenant: str, request_id: str) -> RunRecord | None:
        """Return the run that a CreateRun request made."""
        return next((run for run in self._runs.values() if (run.tenant, run.request_id) == (tenant, request_id)), None)

    async def add(self, record: RunRecord) -> None:
        """Take in a new run, durably."""
        folder = self._volume.run(record.run_id)
        folder.mkdir(parents=True)
        await self.persist(record)
        self._runs[record.run_id] = record

    async def persist(self, record: RunRecord) -> None:
        """Write what must survive a restart."""
        await asyncio.to_thread(layout.write_file, self._volume.run(record.run_id) / RUN_FILE, record.to_json())

    async def remove(self, record: RunRecord, *, keep_checkpoints: bool) -> None:
        """Forget a run. Checkpoints that are kept stay loadable by their owner's other runs."""
        del self._runs[record.run_id]
        folder = self._volume.run(record.run_id)
        await asyncio.to_thread(_remove_files, folder, keep_checkpoints=keep_checkpoints, tenant=record.tenant)

    def lose_all(self) -> None:
        """Note that the engine is gone and the weights of every run with it."""
        for record in self._runs.values():
            record.state, record.in_engine = RunState.LOST, False
            record.sequencer.fail_waiting(lost(record))


def lost(record: RunRecord) -> errors.RunStateLost:
    """Make the error that a run without weights answers."""
    checkpoint = record.latest_state_checkpoint
    remedy = f"load {checkpoint} with its optimizer and go on from there" if checkpoint else "make a new run"
    return errors.RunStateLost(
        f"the run's weights in memory were lost; {remedy}", field="run_id", metadata={"checkpoint": checkpoint}
    )


def _kind_folders(folder: Path) -> Iterable[Path]:
    return (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _remove_files(folder: Path, *, keep_checkpoints: bool, tenant: str) -> None:
    if not keep_checkpoints:
        layout.remove_directory(folder)
        return
    layout.write_file(folder / "deleted.json", json.dumps({"tenant": tenant}).encode())
    (folder / RUN_FILE).unlink()
    shutil.rmtree(folder / "versions", ignore_errors=True)
