"""Writing a run's journal: records that wait at the same time share one write and one sync.

Each run has files of its own, so that one run's damage, end or truncation is no other's. Runs that sync at the same
time do so from several threads, and the filesystem commits them together. A file is open while it is written and no
longer, so that the runs of a trainer are not limited by its descriptors.

A sync that fails may have dropped what was written, and the next would say that all is well. The segment is then given
up after the last byte that was synced, and what came since is written again, into a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from paceline import errors, layout
from paceline.log import get_logger
from trainer_service.backoff import backoff
from trainer_service.failpoints import Failpoints, die
from trainer_service.journal.frames import UNIT, Header, SegmentName, encode_frame
from trainer_service.journal.history import End, History, read_history, segment_path, segments
from trainer_service.journal.index import RESERVED, read_index, write_index
from trainer_service.journal.records import CommandRecord, Record, encode
from trainer_service.limits.free_space import DiskGuard

_log = get_logger(__name__)

_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 30.0
"""Between two attempts to write what cannot wait: after the first, and at most."""
_FULL_RETRY_SECONDS = 5.0
_MOST_UNSYNCED_BYTES = 8 << 20
"""Answers that need no sync are synced all the same once there are so many: they are kept until then."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    data: bytes
    sync: bool
    command: int
    """seq_id of a command, which is refused when it cannot be written; 0 for what is kept and written later."""
    written: asyncio.Future[None]


@dataclass(slots=True)
class _Open:
    """The segment that is written."""

    name: SegmentName
    header: Header
    length: int
    durable: int = 0
    """Bytes that are known to be on the disk."""
    kept: int = UNIT
    """Bytes that stay when the segment is given up: those that are durable, or were there when it was opened."""
    unsynced: list[bytes] = field(default_factory=list)
    """Payloads behind those bytes."""


class RunJournal:
    """One run's journal, to be appended to. Belongs to one event loop."""

    def __init__(
        self,
        directory: Path,
        past: History,
        threads: ThreadPoolExecutor,
        failpoints: Failpoints,
        guard: DiskGuard,
    ) -> None:
        """Go on behind what was read of a journal: in its newest segment, or in a new one where that has a torn end."""
        self._directory = directory
        self._last_written = past.last_seq_id
        self._threads = threads
        self._failpoints = failpoints
        self._guard = guard
        index = read_index(directory)
        self._limit = index.limit if index else 0
        self._segment: _Open | None = None
        self._previous: tuple[SegmentName, int] | None = None
        """The segment before the one that is made next, and how many of its bytes count."""
        self._go_on_from(past.end)
        self._queue: list[_Entry] = []
        self._again: list[bytes] = []
        """Payloads of a segment that was given up, to be written first."""
        self._writing: asyncio.Task[None] | None = None
        self.appended_bytes = 0
        """Bytes of records since this object was made."""
        self.on_refused: Callable[[errors.PacelineError], None] = lambda _error: None
        """Called when commands could not be written, with the reason; nothing is executed then."""

    @staticmethod
    def make(directory: Path, base: int) -> None:
        """Make an empty journal whose first command will be `base`, durably, where there is none. Raises DiskFull."""
        with layout.new_directory(directory) as staging:
            segment_path(staging, SegmentName(base)).write_bytes(Header.new(None, 0).encode())
        write_index(directory, SegmentName(base), base - 1 + RESERVED)

    def append(self, record: Record, *, sync: bool) -> asyncio.Future[None]:
        """Append a record; the future is done when it is written, and with `sync` durable.

        A command's raises DiskFull when there is no room: then neither it nor any command after it was written.
        """
        written = asyncio.get_running_loop().create_future()
        written.add_done_callback(lambda done: done.cancelled() or done.exception())
        command = record.seq_id if isinstance(record, CommandRecord) else 0
        self._queue.append(_Entry(encode(record), sync, command, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_queue())
        return written

    async def rotate(self) -> None:
        """Go on in a new segment, which begins with the first command that is not in the old one."""
        await self._settled()
        if self._segment is not None and self._last_written + 1 == self._segment.name.base:
            return
        await self._between_writes(self._rotate)

    async def begin_anew(self) -> str:
        """Set aside what there is, which is damaged, and begin with the next command; return its new name."""
        aside: list[str] = []
        await self._settled()
        await self._between_writes(lambda: aside.append(self._begin_anew()))
        return aside[0]

    async def drop(self, seq_id: int) -> None:
        """Remove the segments in which every command is at or below `seq_id`."""
        await asyncio.to_thread(self._drop, seq_id)

    async def close(self) -> None:
        """Write what waits."""
        await self._settled()

    async def _settled(self) -> None:
        while self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})

    async def _between_writes(self, work: Callable[[], None]) -> None:
        self._writing = asyncio.create_task(self._in_thread(work))
        await self._writing
        if self._queue:
            self._writing = asyncio.create_task(self._write_queue())

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _write_queue(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while self._queue:
            batch, self._queue = self._queue, []
            try:
                await loop.run_in_executor(self._threads, self._write, batch)
            except errors.DiskFull as error:
                self._refuse(batch, error if error.retry_after else _full())
                if any(entry.command for entry in batch):
                    continue  # Answers may use what the guard keeps free.
            except OSError as error:
                self._refuse(batch, self._reason(error))
            else:
                _settle(batch)
                failures = 0
                continue
            # What is the same when it is made again is written with the next that is. A refusal may not be: whoever
            # was told of it, and the start after a kill, have to agree.
            _settle([entry for entry in self._queue if not entry.sync])
            if not any(entry.sync for entry in self._queue):
                return
            failures += 1
            await asyncio.sleep(backoff(failures, _RETRY_SECONDS, _MOST_RETRY_SECONDS))

    def _write(self, batch: list[_Entry]) -> None:
        payload = b"".join(entry.data for entry in batch)
        if any(entry.command for entry in batch):
            self._guard.check(self._directory, len(payload), _FULL_RETRY_SECONDS)
        last = max([self._last_written, *(entry.command for entry in batch)])
        must_sync = any(entry.sync for entry in batch)
        self._failpoints.hit("before_append")
        try:
            self._append(payload, last, must_sync=must_sync)
        except _SyncFailedError as failure:
            _log.error("journal not synced; going on in a new segment", path=str(failure.path), error=str(failure))
            self._append(payload, last, must_sync=must_sync)
        self._last_written = last
        self.appended_bytes += len(payload)

    def _append(self, payload: bytes, last: int, *, must_sync: bool) -> None:
        """Append a frame. Raises OSError where it was not, DiskFull, or _SyncFailedError and gives up the segment."""
        segment = self._segment or self._new_segment(self._last_written + 1)
        if last > self._limit:
            self._reserve(segment.name, last)
        whole = b"".join([*self._again, payload])
        must_sync = must_sync or bool(self._again)
        frame = encode_frame(segment.header, segment.length, segment.durable, last, whole)
        path = segment_path(self._directory, segment.name)
        file = os.open(path, os.O_WRONLY)
        try:
            self._put(file, frame, segment)
            unsynced = sum(map(len, segment.unsynced)) + len(whole)
            if must_sync or unsynced > _MOST_UNSYNCED_BYTES:
                try:
                    os.fdatasync(file)
                except OSError as error:
                    self._give_up(segment)
                    raise _SyncFailedError(path, error) from error
                segment.length += len(frame)
                segment.durable = segment.kept = segment.length
                segment.unsynced.clear()
                self._failpoints.hit("after_sync")
            else:
                segment.length += len(frame)
                segment.unsynced.append(whole)
        finally:
            os.close(file)
            self._guard.measure(path)
        self._again.clear()

    def _put(self, file: int, frame: bytes, segment: _Open) -> None:
        if self._failpoints.is_next("mid_append"):
            os.pwrite(file, frame[: len(frame) // 2], segment.length)
            die()
        self._failpoints.hit("mid_append")
        try:
            os.lseek(file, segment.length, os.SEEK_SET)
            layout.write_all(file, frame)
        except OSError:
            try:
                os.ftruncate(file, segment.length)
            except OSError:
                self._give_up(segment)
            raise
        self._failpoints.hit("after_append")

    def _give_up(self, segment: _Open) -> None:
        self._again = [*segment.unsynced, *self._again]
        self._previous, self._segment = (segment.name, segment.kept), None

    def _new_segment(self, base: int) -> _Open:
        """Make a segment behind the last one, durably; one that has its name is whole."""
        header = Header.new(*(self._previous or (None, 0)))
        used = [name.generation for name in segments(self._directory) if name.base == base]
        name = SegmentName(base, max(used, default=-1) + 1)
        layout.write_file(segment_path(self._directory, name), header.encode())
        self._guard.measure(segment_path(self._directory, name))
        self._reserve(name, self._last_written)
        self._segment = _Open(name, header, UNIT, durable=UNIT)
        return self._segment

    def _reserve(self, newest: SegmentName, last: int) -> None:
        limit = max(self._limit, last + RESERVED)
        write_index(self._directory, newest, limit)
        self._limit = limit

    def _refuse(self, batch: list[_Entry], reason: errors.PacelineError) -> None:
        """Refuse the commands that wait; what else waits is still to be written."""
        _log.error("journal not written", directory=str(self._directory), error=str(reason))
        waiting = [*batch, *self._queue]
        self._queue = [entry for entry in waiting if not entry.command]
        self.on_refused(reason)
        for entry in waiting:
            if entry.command and not entry.written.done():
                entry.written.set_exception(reason)

    @staticmethod
    def _reason(error: OSError) -> errors.PacelineError:
        if isinstance(layout.translate(error), errors.DiskFull):
            return _full()
        return errors.Internal(f"the journal cannot be written: {error.strerror}")

    def _rotate(self) -> None:
        segment = self._segment
        try:
            if segment is not None:
                self._sync(segment)
                self._previous, self._segment = (segment.name, segment.length), None
            self._new_segment(self._last_written + 1)
        except (OSError, errors.DiskFull) as error:
            self._segment = segment
            _log.warning("journal goes on in its old segment", directory=str(self._directory), error=str(error))

    def _sync(self, segment: _Open) -> None:
        file = os.open(segment_path(self._directory, segment.name), os.O_WRONLY)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)
        segment.durable = segment.kept = segment.length
        segment.unsynced.clear()

    def _begin_anew(self) -> str:
        aside = layout.set_aside(self._directory)
        self.make(self._directory, max(self._last_written + 1, 2))
        past = read_history(self._directory)
        self._go_on_from(past.end)
        self._last_written = past.last_seq_id
        self._limit = self._last_written + RESERVED
        self._again.clear()
        return aside.name

    def _go_on_from(self, end: End | None) -> None:
        self._segment = self._previous = None
        if end is not None and end.header is not None and end.good_bytes == end.size:
            self._segment = _Open(end.name, end.header, end.size, kept=end.size)
        elif end is not None:
            self._previous = (end.name, end.good_bytes)

    def _drop(self, seq_id: int) -> None:
        found = segments(self._directory)
        bases = sorted({name.base for name in found})
        covered = [base for base, following in itertools.pairwise(bases) if following <= seq_id + 1]
        for name, path in found.items():
            if name.base in covered:
                path.unlink()
                self._guard.measure(path)


class _SyncFailedError(OSError):
    """The disk did not take what was written to a segment, which is given up."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.path = path


def _full() -> errors.DiskFull:
    message = "the checkpoint volume is full; nothing was executed: make room and send the command again"
    return errors.DiskFull(message, retry_after=_FULL_RETRY_SECONDS)


def _settle(entries: list[_Entry]) -> None:
    """Say that entries are written, or will be with the next."""
    for entry in entries:
        if not entry.written.done():
            entry.written.set_result(None)
