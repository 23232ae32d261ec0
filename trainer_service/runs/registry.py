"""All runs of this trainer: read at start; found by id; saved when the trainer stops."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paceline import errors, layout
from paceline.background import Background
from paceline.layout import DELETED_FILE, RUN_FILE
from paceline.log import get_logger
from paceline.rpc.identity import PEER_TENANT, Identity
from paceline.types import RunState
from trainer_service.journal.format import Counters
from trainer_service.journal.snapshots import SnapshotStore
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.runs.deletion import DeletedRuns
from trainer_service.runs.record import RunOrigin, RunRecord
from trainer_service.runs.sequencer import Sequencer
from trainer_service.runs.storage import RunStorage
from trainer_service.volume_files import (
    DamagedFileError,
    declare_format,
    read_own,
    read_run_file,
    tenant_of,
    write_run_file,
)

_CLOSE_SECONDS = 5.0
_SAVE_SECONDS = 8.0
"""Most time that the snapshots of all runs may take when the service stops."""

_log = get_logger(__name__)


class RunRegistry:
    """Finds runs for their owners and persists what must survive a restart."""

    def __init__(self, volume: layout.Volume, storage: RunStorage, guard: DiskGuard) -> None:
        self._volume = volume
        self._guard = guard
        self._storage = storage
        self._deleted = DeletedRuns(volume.root)
        self._runs: dict[str, RunRecord] = {}
        self._unreadable: dict[str, tuple[str, str | None]] = {}
        """Why runs on the volume are not served, and their tenants if some file names them; by run_id."""
        self.engines_lost = 0
        """Number of engines lost since startup."""

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(list(self._runs.values()))

    async def restore(self) -> None:
        """Read every run from the volume, with its commands and answers; its state is not yet in the engine.

        The files of a run that cannot be read are left as they are, and its callers get the reason. Other runs are
        served.
        """
        await asyncio.to_thread(self._prepare)
        for folder in layout.run_folders(self._volume.runs):
            try:
                if (folder / DELETED_FILE).exists():
                    with suppress(OSError):  # its checkpoints are kept, with what a crash left among them
                        await asyncio.to_thread(_sweep, folder)
                    continue
                if await asyncio.to_thread(self._storage.is_empty, folder.name):
                    _log.info("removed the folder of a run that was never created", run=folder.name)
                    await asyncio.to_thread(layout.remove_directory, folder)
                    continue
                record = await self._restore(folder)
            except Exception as error:
                self._unreadable[folder.name] = (str(error), await asyncio.to_thread(tenant_of, folder))
                _log.exception("run cannot be read; its files are left unchanged", run=folder.name)
                continue
            self._runs[record.run_id] = record
            if record.damage:
                _log.error("parts of a run are damaged and set aside", run=record.run_id, damage=record.damage)
        await asyncio.to_thread(self._declare_format)
        await asyncio.to_thread(self._guard.count_all)
        _log.info("runs restored", runs=len(self._runs), unreadable=len(self._unreadable))

    def _prepare(self) -> None:
        """Finish what a crash interrupted, for all runs."""
        layout.make_folder(self._volume.runs)
        for folder in (self._volume.root, self._volume.runs):
            layout.sweep(folder)
            layout.sync_directory(folder)  # what a killed trainer has renamed there counts now
        self._deleted.read()
        self._deleted.finish_all(self._volume.runs)

    def _declare_format(self) -> None:
        """Write the volume's format where it is not known.

        If the disk is full, the next startup does it. Runs are served meanwhile, so that tenants can delete some to
        free space.
        """
        try:
            declare_format(self._volume.root)
        except errors.DiskFull as error:
            _log.warning("the volume's format is not written; the next startup does it", error=error.message)

    async def _restore(self, folder: Path) -> RunRecord:
        run_id = folder.name
        content = await asyncio.to_thread(read_run_file, folder)
        if content["run_id"] != run_id:
            raise DamagedFileError(f"{RUN_FILE} is another run's")
        past = await asyncio.to_thread(self._storage.read_or_restart, run_id, content["last_seq_id"])
        _sweep(folder)
        sequencer = self._storage.open(run_id, content["tenant"], past)
        record = RunRecord.from_run_file(content, sequencer, self._storage.snapshots(run_id))
        record.damage = layout.find_quarantined(folder)
        if past.has_state:
            record.apply(past.counters or Counters())
        else:
            record.state = RunState.LOST
        return record

    def get(self, run_id: str, identity: Identity) -> RunRecord:
        """Return the caller's run. Raises RunNotFound, also for another tenant's; RunStateLost for an unreadable one.

        If the tenant of an unreadable run cannot be read either, any caller gets RunStateLost.
        """
        record = self._runs.get(run_id)
        if record is not None and identity.tenant in {record.tenant, PEER_TENANT}:
            return record
        layout.check_run_id(run_id)
        if run_id in self._unreadable:
            reason, owner = self._unreadable[run_id]
            if owner in {None, identity.tenant} or identity.is_peer:
                message = f"the run cannot be read and its files were left unchanged ({reason})"
                remedy = "restore them, then restart the trainer"
                raise errors.RunStateLost(f"{message}; {remedy}", field="run_id", metadata={"checkpoint": ""})
        raise errors.RunNotFound.of(run_id, field="run_id")

    def owned_by(self, identity: Identity) -> list[RunRecord]:
        """Return the caller's runs."""
        return [record for record in self._runs.values() if identity.is_peer or record.tenant == identity.tenant]

    def tenants(self) -> list[str]:
        """Return the tenants that have runs."""
        return list({record.tenant for record in self._runs.values()})

    def next_create_time(self) -> datetime:
        """Return the time for a new run: now, or after that of each run, so that the order of creation is kept.

        The wall clock may have been set back since.
        """
        newest = max((record.create_time for record in self._runs.values()), default=None)
        now = datetime.now(UTC)
        return now if newest is None else max(now, newest + timedelta(microseconds=1))

    def find_request(self, tenant: str, request_id: str) -> RunRecord | None:
        """Return the run that a CreateRun request created."""
        return next((run for run in self._runs.values() if (run.tenant, run.request_id) == (tenant, request_id)), None)

    def find_deleted(self, tenant: str, request_id: str) -> str:
        """Return the digest of the CreateRun request of a deleted run; empty if there is none."""
        return self._deleted.find(tenant, request_id)

    def deleted(self) -> set[str]:
        """Return the runs that are known to have been deleted, as far back as they are kept."""
        return self._deleted.run_ids() - self._runs.keys() - self._unreadable.keys()

    async def origin(self, run_id: str) -> RunOrigin:
        """Read the immutable properties of a run, or of a deleted run whose checkpoints were kept."""
        folder = self._volume.run(run_id)
        file = folder / RUN_FILE if run_id in self._runs else folder / DELETED_FILE
        try:
            return RunOrigin.from_json(await asyncio.to_thread(read_own, file))
        except (DamagedFileError, FileNotFoundError) as error:
            message = f"takes its configuration from {file.name}, which is damaged; set the configuration explicitly"
            raise errors.ChecksumMismatch(message, field="like_checkpoint") from error

    @asynccontextmanager
    async def creating(self, run_id: str, tenant: str) -> AsyncIterator[tuple[Sequencer, SnapshotStore]]:
        """Create the folder of a tenant's new run, with an empty journal, for the block that adds the run.

        The folder is removed if the block fails.
        """
        folder = self._volume.run(run_id)
        try:
            self._guard.set_owner(run_id, tenant)
            past = await asyncio.to_thread(self._storage.create, run_id)
            yield self._storage.open(run_id, tenant, past), self._storage.snapshots(run_id)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self._guard.count(run_id)
            raise

    async def add(self, record: RunRecord) -> None:
        """Add a new run durably."""
        await self.persist(record)
        await asyncio.to_thread(self._guard.count, record.run_id)
        self._runs[record.run_id] = record

    async def persist(self, record: RunRecord) -> None:
        """Write what must survive a restart, as it is once earlier writes are done. Raises DiskFull."""
        async with record.persisting:
            await self.write(record)

    async def write(self, record: RunRecord, **changes: Any) -> None:
        """While `record.persisting` is locked, write run.json with `changes`, which the caller makes afterwards.

        Raises DiskFull, OSError.
        """
        if not record.is_deleted:
            used = record.last_use_time
            content = {**record.to_run_file(), **changes}
            await asyncio.to_thread(write_run_file, self._volume.run(record.run_id), content)
            record.written_use_time = used

    async def persist_if_possible(self, record: RunRecord) -> None:
        """Write what is useful after a restart but not essential: a disk that fails does not undo what was done."""
        try:
            await self.persist(record)
        except (errors.DiskFull, OSError) as error:
            _log.warning("run's file not written; the next change writes it", run=record.run_id, error=str(error))

    async def persist_uses(self) -> None:
        """Write when each run was used last, where that has changed since it was written."""
        for record in list(self._runs.values()):
            if record.last_use_time != record.written_use_time:
                await self.persist_if_possible(record)

    async def remove(self, record: RunRecord, *, keep_checkpoints: bool) -> None:
        """Delete a run, even if the disk is full. Kept checkpoints stay loadable by their owner's runs.

        The run is deleted when this returns, even if the rest of its files can only be removed at the next startup.
        """
        folder = self._volume.run(record.run_id)
        async with record.persisting:
            await asyncio.to_thread(self._deleted.delete_files, folder, keep_checkpoints=keep_checkpoints)
            record.is_deleted = True
            await asyncio.to_thread(self._guard.count, record.run_id)
        self._runs.pop(record.run_id, None)

    def hold_all(self) -> None:
        """Record that the engine is gone, and every run's state with it: commands wait until the state is rebuilt."""
        self.engines_lost += 1
        for record in self._runs.values():
            record.in_engine = record.is_restored = False
            record.sequencer.pause()

    def drain(self) -> None:
        """Refuse commands that have not started; those in a journal execute after the next startup."""
        for record in self._runs.values():
            record.sequencer.drain(_stopping())

    async def save(self) -> None:
        """After `drain`, save a snapshot of each run that executed commands since its last one.

        The next startup then replays nothing. A run whose snapshot is not saved in time is replayed from its last one.
        """
        saving = Background("run not saved; the next startup replays its commands")
        for record in self._runs.values():
            saving.spawn(record.sequencer.save())
        try:
            await asyncio.wait_for(saving.finish(), _SAVE_SECONDS)
        except TimeoutError:
            _log.warning("runs not saved in time; the next startup replays their commands", seconds=_SAVE_SECONDS)
            await saving.close()

    async def close(self) -> None:
        """Close every run's journal."""
        closing = [asyncio.create_task(record.sequencer.close(_stopping())) for record in self._runs.values()]
        if closing:  # one that still waits for acknowledgements is in the journal and continues after the next startup
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
        self._storage.close()


def _stopping() -> errors.ShuttingDown:
    return errors.ShuttingDown("the service is stopping; send the command again once it has restarted")


def _sweep(folder: Path) -> None:
    """Remove the staging directories and files that a crash left in a run's folder.

    A part for which this fails is left to the next start. Whether the run can be served depends on its journal and its
    snapshots, which were read before.
    """
    for part in (folder, *layout.entries(folder, "[!.]*")):
        try:
            layout.sweep(part)
        except OSError as error:
            _log.error("what a crash may have left is not removed", folder=str(part), error=str(error))
