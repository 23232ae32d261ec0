"""The metrics and rollouts of all runs: written by one thread, read by others, watched by callers.

What a client logs is with the operating system before the client is answered. The trainer's own rows wait for
`_GATHER_SECONDS`, so that many steps cost one write. Everything is synced within `_SYNC_SECONDS` after that.
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

_GATHER_SECONDS = 0.1
_SYNC_SECONDS = 1.0
"""A power cut loses at most what was written in this time."""
_OPEN_RUNS = 256
"""Runs whose files' index is in memory; those that were used least recently are let go of."""

T = TypeVar("T")
Make = Callable[[LogFile[StoredRow]], Sequence[StoredRow]]
"""Returns the trainer's own rows; called by the writer, with the file that they come into."""
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
        self._changed: set[str] = set()
        """Runs with rows that their watchers do not know of; only the writer uses it."""
        self._gathered: list[tuple[RunRecord, Make]] = []
        """The trainer's own rows that the writer does not have yet."""
        self._gathering: asyncio.TimerHandle | None = None
        self._newest: Future[Any] | None = None
        """What the writer was given last."""
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
        self._flush()
        return await asyncio.wrap_future(self._submit(lambda: self._append(run, request_id, row, rollouts)))

    def record(self, run: RunRecord, make: Make) -> None:
        """Append the trainer's own rows soon, one of a command only once.

        What cannot be written is dropped and counted: it never holds up a command.
        """
        self._gathered.append((run, make))
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._flush)

    async def written(self) -> None:
        """Wait until the writer has done what it was given so far."""
        self._flush()
        if self._newest is not None and not self._newest.done():
            await asyncio.wait([asyncio.wrap_future(self._newest)])

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
        self._wake(*self._watching)

    @asynccontextmanager
    async def deleting(self, run_id: str) -> AsyncIterator[None]:
        """Write nothing more of a run whose files are deleted in the block, and end its watches."""
        self._closed.add(run_id)
        self._wake(run_id)
        await asyncio.wrap_future(self._submit(lambda: self._let_go(run_id)))
        yield
        self._closed.discard(run_id)  # from now on the run itself is known to be deleted

    async def close(self) -> None:
        """Write what was given, durably."""
        self._flush()
        await asyncio.wrap_future(self._writer.submit(self._sync))
        self._writer.shutdown()

    def _flush(self) -> None:
        """Give the writer the rows that were gathered."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._submit(lambda: self._record(gathered)).add_done_callback(_log_failure)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Have the writer do work, tell those who watch what it wrote, and sync it a little later."""
        loop = asyncio.get_running_loop()

        def done() -> T:
            was_synced = not self._unsynced
            try:
                return work()
            finally:
                if self._unsynced and was_synced:
                    loop.call_soon_threadsafe(self._sync_later, loop)
                if changed := self._changed & self._watching.keys():
                    loop.call_soon_threadsafe(self._wake, *changed)
                self._changed.clear()
                self._let_go_of_oldest()

        self._newest = submitted = self._writer.submit(done)
        return submitted

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

    def _record(self, gathered: Sequence[tuple[RunRecord, Make]]) -> None:
        """Append the trainer's rows, those of a run at once."""
        by_run: dict[str, list[Make]] = {}
        for run, make in gathered:
            by_run.setdefault(run.run_id, []).append(make)
        for run in {run.run_id: run for run, _ in gathered}.values():
            if run.run_id not in self._closed:
                self._record_of(run, by_run[run.run_id])

    def _record_of(self, run: RunRecord, makes: Sequence[Make]) -> None:
        log, count = self._logs_of(run).rows, len(makes)
        try:
            rows, seen = list[StoredRow](), set[tuple[str, int]]()
            for row in (row for make in makes for row in make(log)):
                about = (row.command, row.seq_id)
                if row.seq_id and (about in seen or log.has_command(*about)):
                    continue  # of a command that is executed several times, the first row stays
                seen.add(about)
                rows.append(row)
            count = len(rows)
            if rows:
                self._write(run, log, rows)
                self._is_refused = False
        except (errors.PacelineError, OSError) as error:
            self._dropped.inc(count)
            if not self._is_refused:
                self._is_refused = True
                message = "the trainer's rows of metrics cannot be written; they are dropped until they can"
                _log.warning(message, run=run.run_id, error=str(error))

    def _write(self, run: RunRecord, log: LogFile[Any], rows: Sequence[StoredRow | StoredRollout]) -> int:
        number = log.append(rows)
        self._unsynced[log] = None
        self._changed.add(run.run_id)
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

    def _wake(self, *run_ids: str) -> None:
        for run_id in run_ids:
            for change in self._watching.get(run_id, ()):
                change.set()


def _log_failure(recorded: Future[None]) -> None:
    if not recorded.cancelled() and (error := recorded.exception()) is not None:
        _log.error("the trainer's rows of metrics are not written", exc_info=error)
