"""All runs of this trainer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline import errors, layout
from paceline.layout import DELETED_FILE, RUN_FILE
from paceline.log import get_logger
from paceline.rpc.identity import Identity
from paceline.types import RunState
from trainer_service.journal.records import Facts
from trainer_service.journal.snapshots import SnapshotStore
from trainer_service.runs.deleted import DeletedRuns
from trainer_service.runs.record import RunOrigin, RunRecord
from trainer_service.runs.sequencer import Sequencer
from trainer_service.runs.storage import Past, RunStorage

_CLOSE_SECONDS = 5.0

_log = get_logger(__name__)


class RunRegistry:
    """Finds runs for their owners, and keeps on the volume what must survive."""

    def __init__(self, volume: layout.Volume, storage: RunStorage) -> None:
        self._volume = volume
        self._storage = storage
        self._deleted = DeletedRuns(volume.root)
        self._runs: dict[str, RunRecord] = {}

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(list(self._runs.values()))

    async def restore(self) -> None:
        """Read every run from the volume, with its commands and answers; its state is not in the engine."""
        self._volume.runs.mkdir(parents=True, exist_ok=True)
        layout.sweep(self._volume.root)
        self._deleted.read()
        for file in sorted(self._volume.runs.glob(f"*/{RUN_FILE}")):
            for folder in (file.parent, *_kind_folders(file.parent)):
                layout.sweep(folder)
            record = await self._restore(file.read_bytes())
            self._runs[record.run_id] = record
        _log.info("runs restored", runs=len(self._runs))

    async def _restore(self, text: bytes) -> RunRecord:
        record_id, last_seq_id = RunRecord.peek(text)
        past = await asyncio.to_thread(self._storage.read_or_restart, record_id, last_seq_id)
        sequencer = self._storage.open(record_id, past)
        record = RunRecord.from_json(text, sequencer, self._storage.snapshots(record_id))
        if past.has_state:
            record.apply(past.facts or Facts())
        else:
            record.state = RunState.LOST
        return record

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

    def find_deleted(self, tenant: str, request_id: str) -> str:
        """Return the digest of the CreateRun request that made a run which was deleted since; empty if none did."""
        return self._deleted.find(tenant, request_id)

    async def origin(self, run_id: str) -> RunOrigin:
        """Read what never changes of a run, also of one that was deleted and whose checkpoints were kept."""
        folder = self._volume.run(run_id)
        file = folder / RUN_FILE if run_id in self._runs else folder / DELETED_FILE
        return RunOrigin.from_json(await asyncio.to_thread(file.read_bytes))

    async def make_journal(self, run_id: str) -> tuple[Sequencer, SnapshotStore]:
        """Make a new run's folder, with an empty journal."""

        def make() -> Past:
            self._volume.run(run_id).mkdir(parents=True)
            layout.sync_directory(self._volume.runs)
            self._storage.make(run_id)
            return self._storage.read(run_id)

        past = await asyncio.to_thread(make)
        return self._storage.open(run_id, past), self._storage.snapshots(run_id)

    async def add(self, record: RunRecord) -> None:
        """Take in a new run, durably."""
        await self.persist(record)
        self._runs[record.run_id] = record

    async def persist(self, record: RunRecord) -> None:
        """Write what must survive a restart, as it is when this is its turn."""
        async with record.persisting:
            await asyncio.to_thread(layout.write_file, self._volume.run(record.run_id) / RUN_FILE, record.to_json())

    async def remove(self, record: RunRecord, *, keep_checkpoints: bool) -> None:
        """Forget a run. Checkpoints that are kept stay loadable by their owner's other runs."""
        del self._runs[record.run_id]
        folder = self._volume.run(record.run_id)
        await asyncio.to_thread(self._deleted.add, record.tenant, record.request_id, record.request_digest)
        await asyncio.to_thread(_remove_files, folder, keep_checkpoints=keep_checkpoints)
        await asyncio.to_thread(self._storage.remove, record.run_id)

    def hold_all(self, error: errors.PacelineError) -> None:
        """Note that the engine is gone and the state of every run with it: commands wait until that is rebuilt."""
        for record in self._runs.values():
            record.in_engine = record.is_restored = False
            record.sequencer.hold(error)

    def drain(self) -> None:
        """Refuse commands that have not begun; those in a journal execute after the next start."""
        for record in self._runs.values():
            record.sequencer.drain(_stopping())

    async def close(self) -> None:
        """Close every run's journal."""
        closing = [asyncio.create_task(record.sequencer.close(_stopping())) for record in self._runs.values()]
        if closing:  # one that still waits for acknowledgements is in the journal, and goes on after the next start
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
        self._storage.close()


def _stopping() -> errors.ShuttingDown:
    return errors.ShuttingDown("the service is stopping; send the command again, and the next one answers it")


def lost(record: RunRecord) -> errors.RunStateLost:
    """Make the error that a run without state answers."""
    checkpoint = record.latest_state_checkpoint
    remedy = f"load {checkpoint} with its optimizer and go on from there" if checkpoint else "make a new run"
    return errors.RunStateLost(
        f"the run's state was lost and its journal cannot be replayed; {remedy}",
        field="run_id",
        metadata={"checkpoint": checkpoint},
    )


def _kind_folders(folder: Path) -> Iterable[Path]:
    return (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _remove_files(folder: Path, *, keep_checkpoints: bool) -> None:
    if not keep_checkpoints:
        layout.remove_directory(folder)
        return
    (folder / RUN_FILE).rename(folder / DELETED_FILE)
    layout.sync_directory(folder)
    shutil.rmtree(folder / "versions", ignore_errors=True)
