"""Append to a run's journal. Records that wait at the same time share one write and one sync.

Each run has its own files, so that damage, truncation or deletion of one journal does not affect other runs. Runs that
sync at the same time do so from several threads, and the file system commits them together. A file is open only while
it is written, so that the number of runs is not limited by file descriptors.

A failed sync may have dropped the written pages, and the next sync would report success. After a failure the segment is
therefore abandoned behind its last synced byte, and everything after that byte is written again to a new segment.

A command that cannot be written is refused only while no file holds all of its bytes. Once one does, a restart may find
the command there even if no sync succeeds, so it stays queued and is written again until a sync succeeds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline import errors, layout
from paceline.log import get_logger
from trainer_service.backoff import backoff
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import (
    UNIT,
    CommandRecord,
    Header,
    Record,
    SegmentName,
    decode_records,
    encode_frame,
    encode_record,
)
from trainer_service.journal.history import (
    RESERVED,
    End,
    History,
    read_history,
    read_index,
    segment_path,
    segments,
    write_index,
)
from trainer_service.limits.disk_guard import DiskGuard

T = TypeVar("T")

_log = get_logger(__name__)

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 30.0
"""Delay between attempts to write records that must be durable: after the first failure, and at most."""
_FULL_RETRY_SECONDS = 5.0
_MAX_UNSYNCED_BYTES = 8 << 20
"""Answers that need no sync are synced once they add up to this many bytes, because they stay in memory until then."""


@dataclass(slots=True, eq=False)
class _Entry:
    data: bytes
    sync: bool
    command: int
    """seq_id of a command; 0 for other records."""
    written: asyncio.Future[None]
    can_be_refused: bool
    """Whether this is a command that no restart can find. If they cannot be written now, others are written later."""


@dataclass(slots=True)
class _OpenSegment:
    """The segment being written."""

    name: SegmentName
    path: Path
    header: Header
    length: int
    durable: int = 0
    """Number of bytes known to be on disk."""
    kept: int = UNIT
    """Number of bytes kept if the segment is abandoned: those that are durable, or existed when it was opened."""
    unsynced: list[bytes] = field(default_factory=list)
    """Payloads after those bytes."""

    def synced(self) -> None:
        """Record that everything written is on disk."""
        self.durable = self.kept = self.length
        self.unsynced.clear()


class RunJournal:
    """One run's journal, open for appending. Belongs to one event loop."""

    def __init__(
        self,
        directory: Path,
        past: History,
        threads: ThreadPoolExecutor,
        failpoints: Failpoints,
        guard: DiskGuard,
    ) -> None:
        """Continue the journal that `past` was read from: in its newest segment, or a new one after a torn tail."""
        self._directory = directory
        self._last_written = past.last_seq_id
        self._threads = threads
        self._failpoints = failpoints
        self._guard = guard
        index = read_index(directory)
        self._limit = index.limit if index else 0
        self._segment: _OpenSegment | None = None
        self._previous: tuple[SegmentName, int] | None = None
        """The predecessor of the next segment to be created, and its number of valid bytes."""
        self._resume_at(past.end)
        self._queue: list[_Entry] = []
        self._batch: list[_Entry] = []
        """Entries that are being written."""
        self._rewrite: list[bytes] = []
        """Payloads of an abandoned segment, to be written first."""
        self._writing: asyncio.Future[Any] | None = None
        self._aside = ""
        """Name of the damaged journal that was set aside last."""
        self.appended_bytes = 0
        """Bytes of records appended since this object was created."""
        self.on_refused: Callable[[errors.PacelineError, Sequence[int]], None] = lambda _error, _seq_ids: None
        """Called if records could not be written, with the reason and the seq_ids of the commands that were refused.

        All others are executed once they are durable, in this process or the next.
        """

    @staticmethod
    def create(directory: Path, base: int) -> None:
        """Durably create an empty journal where none exists; its first command will be `base`. Raises DiskFull."""
        with layout.new_directory(directory) as staging:
            segment_path(staging, SegmentName(base)).write_bytes(Header.new(None, 0).encode())
        write_index(directory, SegmentName(base), base - 1 + RESERVED)

    def append(self, record: Record, *, sync: bool) -> asyncio.Future[None]:
        """Append a record. The future resolves when the record is written and, with `sync`, durable.

        A command's future raises DiskFull if the disk is full, and EngineUnavailable if writing fails otherwise; then
        neither it nor any later command was written.
        """
        written = asyncio.get_running_loop().create_future()
        written.add_done_callback(lambda done: done.cancelled() or done.exception())
        command = record.seq_id if isinstance(record, CommandRecord) else 0
        self._queue.append(_Entry(encode_record(record), sync, command, written, can_be_refused=command > 0))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_queue())
        return written

    def unwritten(self) -> list[Record]:
        """Return the records that may not be in the files yet, oldest first."""
        return decode_records(b"".join([*self._rewrite, *(entry.data for entry in (*self._batch, *self._queue))]))

    async def rotate(self) -> None:
        """Continue in a new segment, which starts with the first command that is not in the old one."""
        await self.flush()
        if self._segment is not None and self._last_written + 1 == self._segment.name.base:
            return
        await self._between_writes(self._rotate)

    async def start_over(self) -> str:
        """Set the damaged journal aside and start a new one at the next command; return the old one's new name."""
        await self.flush()
        return await self._between_writes(self._start_over)

    async def drop(self, seq_id: int) -> int:
        """Remove the segments in which every command is at or below `seq_id`; return the first command still there."""
        return await asyncio.to_thread(self._drop, seq_id)

    async def flush(self) -> None:
        """Wait until the queue is written."""
        while self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})

    async def _between_writes(self, work: Callable[[], T]) -> T:
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # A single task does the work and then writes what was appended meanwhile, so that two never write at once, even
        # if the caller is cancelled.
        self._writing = asyncio.create_task(self._write_queue(after=working))
        return await asyncio.shield(working)

    async def _write_queue(self, after: asyncio.Future[Any] | None = None) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        if after is not None:
            await asyncio.wait({after})
        while self._queue:
            batch, self._queue = self._queue, []
            self._batch = batch
            try:
                await loop.run_in_executor(self._threads, self._write, batch)
            except errors.DiskFull as error:
                if self._refuse(batch, error if error.retry_after else _full()):
                    continue  # Answers may use the space that the guard keeps free.
            except OSError as error:
                self._refuse(batch, self._reason(error))
            else:
                _resolve(batch)
                failures = 0
                continue
            finally:
                self._batch = []
            # An answer that a second execution reproduces can be written with a later record. A refusal may not be
            # reproduced, and the state after a kill has to agree with what the client was told.
            _resolve([entry for entry in self._queue if not entry.sync])
            if not any(entry.sync for entry in self._queue):
                return
            failures += 1
            await asyncio.sleep(backoff(failures, _RETRY_SECONDS, _MAX_RETRY_SECONDS))

    def _write(self, batch: list[_Entry]) -> None:
        payload = b"".join(entry.data for entry in batch)
        if any(entry.can_be_refused for entry in batch):
            self._guard.check_free(self._directory, len(payload), _FULL_RETRY_SECONDS)
        last = max([self._last_written, *(entry.command for entry in batch)])
        must_sync = any(entry.sync for entry in batch)
        self._failpoints.hit("before_append")
        try:
            self._append(payload, last, must_sync=must_sync)
        except _SyncFailedError as failure:
            _log.error("journal not synced; continuing in a new segment", path=str(failure.path), error=str(failure))
            self._append(payload, last, must_sync=must_sync)
        self._last_written = last
        self.appended_bytes += len(payload)

    def _append(self, payload: bytes, last: int, *, must_sync: bool) -> None:
        """Append a frame. Raises OSError if that failed, DiskFull, or _SyncFailedError after abandoning the segment."""
        segment = self._segment or self._new_segment(self._last_written + 1)
        if last > self._limit:
            self._reserve(segment.name, last)
        whole = b"".join([*self._rewrite, payload])
        must_sync = must_sync or bool(self._rewrite)
        frame = encode_frame(segment.header, segment.length, segment.durable, last, whole)
        file = os.open(segment.path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            self._write_frame(file, frame, segment)
            segment.length += len(frame)
            for entry in self._batch:
                entry.can_be_refused = False
            unsynced = sum(map(len, segment.unsynced)) + len(whole)
            if must_sync or unsynced > _MAX_UNSYNCED_BYTES:
                try:
                    os.fdatasync(file)
                except OSError as error:
                    self._abandon(segment)
                    raise _SyncFailedError(segment.path, error) from error
                segment.synced()
                self._failpoints.hit("after_sync")
            else:
                segment.unsynced.append(whole)
        finally:
            os.close(file)
            self._guard.measure(segment.path)
        self._rewrite.clear()

    def _write_frame(self, file: int, frame: bytes, segment: _OpenSegment) -> None:
        if self._failpoints.left.get("mid_append") == 1:  # the process dies below
            os.pwrite(file, frame[: len(frame) // 2], segment.length)
        self._failpoints.hit("mid_append")
        try:
            os.lseek(file, segment.length, os.SEEK_SET)
            layout.write_all(file, frame)
        except OSError:
            try:
                os.ftruncate(file, segment.length)
            except OSError:
                self._abandon(segment)
            raise
        self._failpoints.hit("after_append")

    def _abandon(self, segment: _OpenSegment) -> None:
        self._rewrite = [*segment.unsynced, *self._rewrite]
        self._previous, self._segment = (segment.name, segment.kept), None

    def _new_segment(self, base: int) -> _OpenSegment:
        """Durably create the segment after the last one; a file with a segment's name is complete.

        If this fails and the file exists, it is the successor of the last segment nevertheless: readers take of that
        what the file's header says. So whatever follows continues the file.
        """
        header = Header.new(*(self._previous or (None, 0)))
        used = [name.generation for name in segments(self._directory) if name.base == base]
        name = SegmentName(base, max(used, default=-1) + 1)
        path = segment_path(self._directory, name)
        try:
            layout.write_file(path, header.encode())
            self._guard.measure(path)
            self._reserve(name, self._last_written)
        except (OSError, errors.DiskFull):
            if os.path.lexists(path):
                self._previous = (name, UNIT)
            raise
        self._segment = _OpenSegment(name, path, header, UNIT, durable=UNIT)
        return self._segment

    def _reserve(self, newest: SegmentName, last: int) -> None:
        limit = max(self._limit, last + RESERVED)
        write_index(self._directory, newest, limit)
        self._limit = limit

    def _refuse(self, batch: list[_Entry], reason: errors.PacelineError) -> int:
        """Refuse the waiting commands that can be; the other records stay queued. Return the number of the batch's."""
        _log.error("journal not written", directory=str(self._directory), error=str(reason))
        waiting = [*batch, *self._queue]
        refused = [entry for entry in waiting if entry.can_be_refused]
        self._queue = [entry for entry in waiting if not entry.can_be_refused]
        for entry in refused:
            if not entry.written.done():
                entry.written.set_exception(reason)
        self.on_refused(reason, [entry.command for entry in refused])
        return sum(entry.can_be_refused for entry in batch)

    @staticmethod
    def _reason(error: OSError) -> errors.PacelineError:
        if isinstance(layout.translate_os_error(error), errors.DiskFull):
            return _full()
        return errors.EngineUnavailable(f"the run's journal cannot be written ({error.strerror}); send it again")

    def _rotate(self) -> None:
        segment, end = self._segment, None
        try:
            if segment is not None:
                self._sync(segment)
                end = (segment.name, segment.length)
                self._previous, self._segment = end, None
            self._new_segment(self._last_written + 1)
        except (OSError, errors.DiskFull) as error:
            if end is not None and self._previous is end:  # it was synced, and no file follows it
                self._segment = segment
            _log.warning(
                "journal not rotated; it is tried again later", directory=str(self._directory), error=str(error)
            )

    def _sync(self, segment: _OpenSegment) -> None:
        try:
            layout.sync_file(segment.path)
        except OSError:
            self._abandon(segment)
            raise
        segment.synced()

    def _start_over(self) -> str:
        if self._directory.exists():  # unless an attempt before this one lacked space for the new journal
            self._aside = layout.quarantine(self._directory).name
        try:
            self.create(self._directory, max(self._last_written + 1, 2))
        finally:
            if self._directory.exists():  # also if only its index was not written: the next append does that
                past, index = read_history(self._directory), read_index(self._directory)
                self._resume_at(past.end)
                self._last_written = past.last_seq_id
                self._limit = index.limit if index else 0
                self._rewrite.clear()
        return self._aside

    def _resume_at(self, end: End | None) -> None:
        self._segment = self._previous = None
        if end is not None and end.good_bytes == end.size:
            path = segment_path(self._directory, end.name)
            self._segment = _OpenSegment(end.name, path, end.header, end.size, kept=end.size)
        elif end is not None:
            self._previous = (end.name, end.good_bytes)

    def _drop(self, seq_id: int) -> int:
        found = segments(self._directory)
        bases = sorted({name.base for name in found})
        covered = [base for base, following in itertools.pairwise(bases) if following <= seq_id + 1]
        for name, path in found.items():
            if name.base in covered:
                path.unlink()
                self._guard.measure(path)
        return min(set(bases) - set(covered), default=0)


class _SyncFailedError(OSError):
    """A segment could not be synced and was abandoned."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.path = path


def _full() -> errors.DiskFull:
    message = "the checkpoint volume is full; nothing was executed: free space and send the command again"
    return errors.DiskFull(message, retry_after=_FULL_RETRY_SECONDS)


def _resolve(entries: list[_Entry]) -> None:
    """Resolve the futures of entries that are written, or will be with the next ones."""
    for entry in entries:
        if not entry.written.done():
            entry.written.set_result(None)
