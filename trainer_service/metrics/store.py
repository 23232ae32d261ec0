"""The metrics and rollouts of all runs: written by one thread, read by others, watched by callers.

What is written is with the operating system before its caller is answered, and is synced within `_SYNC_SECONDS`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter

from paceline import errors, layout
from paceline.log import get_logger
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.metrics.log_file import LogFile
from trainer_service.metrics.rows import StoredRollout, StoredRow
from trainer_service.metrics.shrinking import drop_oldest, thin
from trainer_service.runs.record import RunRecord

_SYNC_SECONDS = 1.0
"""A power cut loses at most what was written in this time."""
_OPEN_RUNS = 256
"""Runs whose files' index is in memory; those that were used least recently are let go of."""

T = TypeVar("T")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunLogs:
    """The files of a run."""

    rows: LogFile[StoredRow]
    rollouts: LogFile[StoredRollout]


class MetricsStore:
    """Appends to the files of runs, reads them, and tells who watches that there is more."""

    def __init__(
        self,
        volume: layout.Volume,
        guard: DiskGuard,
        registry: CollectorRegistry,
        max_metrics_bytes: int,
        max_rollouts_bytes: int,
    ) -> None:
        """Keep at most so many bytes of a run's metrics and of its rollouts."""
        self._volume = volume
        self._guard = guard
        self._most = max_metrics_bytes, max_rollouts_bytes
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._logs: OrderedDict[str, RunLogs] = OrderedDict()
        """By run. Only the writer lets go of some, so that no run has two."""
        self._lock = threading.Lock()
        """Held while `_logs` is changed."""
        self._unsynced: dict[LogFile[Any], None] = {}
        """Files that were written since the last sync; only the writer uses it."""
        self._watching: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._closed: set[str] = set()
        """Runs that are being deleted."""
        self._is_draining = False
        self._is_refused = False
        """Whether the last of the trainer's own rows could not be written."""
        self._dropped = Counter(
            "paceline_trainer_metrics_rows_dropped",
            "Rows of the trainer's own that could not be written",
            registry=registry,
        )

    async def log(
        self, run: RunRecord, request_id: str, row: StoredRow | None, rollouts: Sequence[StoredRollout]
    ) -> tuple[int, int]:
        """Append what a client logs, unless its request has done so before.

        Returns the number of the row, 0 if there is none, and of the last rollout. Raises RunNotFound, DiskFull,
        QuotaExceeded, OSError.
        """
        self.check_is_open(run)
        return await asyncio.wrap_future(self._submit(run, lambda: self._append(run, request_id, row, rollouts)))

    def record(self, run: RunRecord, make: Callable[[LogFile[StoredRow]], Sequence[StoredRow]]) -> Future[None]:
        """Append the trainer's own rows, which `make` returns in the writer's thread, one of a command only once.

        What cannot be written is dropped and counted: it never holds up a command.
        """
        recorded = self._submit(run, lambda: self._record(run, make))
        recorded.add_done_callback(_log_failure)
        return recorded

    async def read(self, run: RunRecord, read: Callable[[RunLogs], T]) -> T:
        """Return what a function reads of a run's files, in a thread. Raises RunNotFound, OSError."""
        self.check_is_open(run)
        return await asyncio.to_thread(lambda: read(self._logs_of(run)))

    def check_is_open(self, run: RunRecord) -> None:
        """Raise RunNotFound if a run is deleted, or is about to be."""
        if run.is_deleted or run.run_id in self._closed:
            raise errors.RunNotFound.of(run.run_id, field="run_id")

    @contextmanager
    def watching(self, run: RunRecord) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever rows were written, the run is deleted, or watches have to end."""
        change = asyncio.Event()
        self._watching[run.run_id].add(change)
        try:
            yield change
        finally:
            self._watching[run.run_id].discard(change)
            if not self._watching[run.run_id]:
                del self._watching[run.run_id]

    def check_watch(self, run: RunRecord) -> None:
        """Raise RunNotFound or ShuttingDown if a watch has to end."""
        self.check_is_open(run)
        if self._is_draining:
            raise errors.ShuttingDown("the service is stopping; watch again once it has restarted")

    def drain(self) -> None:
        """End the watches."""
        self._is_draining = True
        for run_id in list(self._watching):
            self._wake(run_id)

    @asynccontextmanager
    async def deleting(self, run_id: str) -> AsyncIterator[None]:
        """Write nothing more of a run whose files are deleted in the block, and end its watches."""
        self._closed.add(run_id)
        self._wake(run_id)
        await asyncio.wrap_future(self._writer.submit(self._let_go, run_id))
        yield
        self._closed.discard(run_id)  # from now on the run itself is known to be deleted

    async def close(self) -> None:
        """Write what was given, durably."""
        await asyncio.wrap_future(self._writer.submit(self._sync))
        self._writer.shutdown()

    def _submit(self, run: RunRecord, work: Callable[[], T]) -> Future[T]:
        """Have the writer do work on a run, tell those who watch it, and sync what was written a little later."""
        loop = asyncio.get_running_loop()

        def done() -> T:
            was_synced = not self._unsynced
            try:
                return work()
            finally:
                if self._unsynced and was_synced:
                    loop.call_soon_threadsafe(self._sync_later, loop)
                if run.run_id in self._watching:
                    loop.call_soon_threadsafe(self._wake, run.run_id)
                self._let_go_of_oldest()

        return self._writer.submit(done)

    def _sync_later(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(_SYNC_SECONDS, self._sync_now)

    def _sync_now(self) -> None:
        with suppress(RuntimeError):  # the writer has been shut down, after a sync
            self._writer.submit(self._sync)

    def _append(
        self, run: RunRecord, request_id: str, row: StoredRow | None, rollouts: Sequence[StoredRollout]
    ) -> tuple[int, int]:
        logs = self._logs_of(run)
        # Before the row: a repetition adds those that a crash has cut off.
        known = logs.rollouts.request(request_id) if rollouts else None
        if known is not None and (missing := rollouts[known.lines :]):
            number = self._write(run, logs.rollouts, missing)
        else:
            number = known.number if known is not None else 0
        if row is None:
            return 0, number
        row_number = logs.rows.request(request_id).number or self._write(run, logs.rows, [row])
        return row_number, number

    def _record(self, run: RunRecord, make: Callable[[LogFile[StoredRow]], Sequence[StoredRow]]) -> None:
        if run.run_id in self._closed:
            return
        log, made = self._logs_of(run).rows, 1
        try:
            rows = [row for row in make(log) if not row.seq_id or not log.has_command(row.command, row.seq_id)]
            made = len(rows)
            if rows:
                self._write(run, log, rows)
                self._is_refused = False
        except (errors.PacelineError, OSError) as error:
            self._dropped.inc(made)
            if not self._is_refused:
                self._is_refused = True
                message = "the trainer's rows of metrics cannot be written; they are dropped until they can"
                _log.warning(message, run=run.run_id, error=str(error))

    def _write(self, run: RunRecord, log: LogFile[Any], rows: Sequence[StoredRow | StoredRollout]) -> int:
        number = log.append(rows)
        self._unsynced[log] = None
        return number

    def _sync(self) -> None:
        unsynced, self._unsynced = self._unsynced, {}
        for log in unsynced:
            try:
                log.sync()
            except FileNotFoundError:
                pass  # the run is deleted
            except OSError as error:
                _log.warning("a run's metrics are not synced", file=str(log.path), error=str(error))

    def _logs_of(self, run: RunRecord) -> RunLogs:
        folder, (most_metrics, most_rollouts) = self._volume.run(run.run_id), self._most
        with self._lock:
            logs = self._logs.get(run.run_id)
            if logs is None:
                guard, tenant = self._guard, run.tenant
                rows = LogFile(folder / layout.METRICS_FILE, StoredRow, most_metrics, thin, guard, tenant)
                file = folder / layout.ROLLOUTS_FILE
                rollouts = LogFile(file, StoredRollout, most_rollouts, drop_oldest, guard, tenant)
                logs = self._logs[run.run_id] = RunLogs(rows, rollouts)
            self._logs.move_to_end(run.run_id)
        return logs

    def _let_go(self, run_id: str) -> None:
        with self._lock:
            self._logs.pop(run_id, None)

    def _let_go_of_oldest(self) -> None:
        with self._lock:
            while len(self._logs) > _OPEN_RUNS:
                self._logs.popitem(last=False)

    def _wake(self, run_id: str) -> None:
        for change in self._watching.get(run_id, ()):
            change.set()


def _log_failure(recorded: Future[None]) -> None:
    if not recorded.cancelled() and (error := recorded.exception()) is not None:
        _log.error("the trainer's rows of metrics are not written", exc_info=error)
