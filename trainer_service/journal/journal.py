"""Writing a run's journal: records that wait at the same time share one write and one sync.

Each run has files of its own, so that one run's damage, end or truncation is no other's. Runs that sync at the same
time do so from several threads, and the filesystem commits them together.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline import errors, layout
from paceline.log import get_logger
from trainer_service.disk import DiskGuard
from trainer_service.failpoints import Failpoints, die
from trainer_service.journal import history
from trainer_service.journal.records import CommandRecord, Record, encode

_log = get_logger(__name__)

_FULL_RETRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    data: bytes
    sync: bool
    command: int
    """seq_id of a command, which is refused when it cannot be written; 0 for what is kept and written later."""
    written: asyncio.Future[None]


class RunJournal:
    """One run's journal, open for appending. Belongs to one event loop."""

    def __init__(
        self,
        directory: Path,
        last_seq_id: int,
        threads: ThreadPoolExecutor,
        failpoints: Failpoints,
        guard: DiskGuard,
    ) -> None:
        """Open the newest segment of an existing journal, without its torn end; its last command is `last_seq_id`."""
        self._directory = directory
        self._last_written = last_seq_id
        self._threads = threads
        self._failpoints = failpoints
        self._guard = guard
        self._base = max(history.segments(directory))
        path = history.segment_path(directory, self._base)
        self._length = history.drop_torn_end(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._queue: list[_Entry] = []
        self._writing: asyncio.Task[None] | None = None
        self.appended_bytes = 0
        """Bytes of records since this object was made."""
        self.on_refused: Callable[[errors.PacelineError], None] = lambda _error: None
        """Called when commands could not be written, with the reason; nothing is executed then."""

    @staticmethod
    def make(directory: Path, base: int) -> None:
        """Make an empty journal whose first command will be `base`, durably; one that exists is replaced."""
        with layout.new_directory(directory, overwrite=True) as staging:
            history.drop_torn_end(history.segment_path(staging, base))

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
        if self._last_written + 1 == self._base:
            return
        self._writing = asyncio.create_task(self._rotate(self._last_written + 1))
        await self._writing
        if self._queue:
            self._writing = asyncio.create_task(self._write_queue())

    async def drop(self, seq_id: int) -> None:
        """Remove the segments in which every command is at or below `seq_id`."""
        await asyncio.to_thread(self._drop, seq_id)

    async def close(self) -> None:
        """Write what waits and close the file."""
        await self._settled()
        os.close(self._file)

    async def _settled(self) -> None:
        while self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})

    async def _write_queue(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            batch, self._queue = self._queue, []
            try:
                await loop.run_in_executor(self._threads, self._write, batch)
            except errors.DiskFull as error:  # answers may use what the guard keeps free
                self._refuse(batch, error)
                continue
            except OSError as error:
                self._refuse(batch, self._reason(error))
                _settle(self._queue)
                return
            _settle(batch)

    def _write(self, batch: list[_Entry]) -> None:
        data = b"".join(entry.data for entry in batch)
        if any(entry.command for entry in batch):
            self._guard.check(self._directory, len(data), _FULL_RETRY_SECONDS)
        try:
            self._failpoints.hit("before_append")
            if self._failpoints.is_next("mid_append"):
                os.write(self._file, data[: len(data) // 2])
                die()
            self._failpoints.hit("mid_append")
            _write_all(self._file, data)
            self._failpoints.hit("after_append")
            if any(entry.sync for entry in batch):
                os.fdatasync(self._file)
                self._failpoints.hit("after_sync")
        except OSError:
            os.ftruncate(self._file, self._length)
            raise
        self._length += len(data)
        self._last_written = max([self._last_written, *(entry.command for entry in batch)])
        self.appended_bytes += len(data)

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
            message = "the checkpoint volume is full; nothing was executed: make room and send the command again"
            return errors.DiskFull(message, retry_after=_FULL_RETRY_SECONDS)
        return errors.Internal(f"the journal cannot be written: {error.strerror}")

    async def _rotate(self, base: int) -> None:
        try:
            file = await asyncio.get_running_loop().run_in_executor(self._threads, self._new_segment, base)
        except OSError as error:
            _log.warning("journal goes on in its old segment", directory=str(self._directory), error=str(error))
            return
        os.close(self._file)
        self._file, self._base = file, base
        self._length = os.fstat(file).st_size

    def _new_segment(self, base: int) -> int:
        os.fdatasync(self._file)
        path = history.segment_path(self._directory, base)
        history.drop_torn_end(path)
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.fsync(file)
        layout.sync_directory(self._directory)
        return file

    def _drop(self, seq_id: int) -> None:
        found = list(history.segments(self._directory).items())
        for (_, path), (next_base, _) in itertools.pairwise(found):
            if next_base <= seq_id + 1:
                path.unlink()


def _settle(entries: list[_Entry]) -> None:
    """Say that entries are written, or will be with the next."""
    for entry in entries:
        if not entry.written.done():
            entry.written.set_result(None)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
