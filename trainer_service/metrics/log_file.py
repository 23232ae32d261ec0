"""A file of numbered JSON lines that is only appended to, and rewritten shorter when it is too long.

What a crash leaves of its last line is not read, and is cut off before the next line is written.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from paceline import errors, layout
from paceline.files.regular_files import open_file
from paceline.log import get_logger
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.metrics.log_reader import LogReader, whole_lines
from trainer_service.metrics.rows import RowSource, Stored
from trainer_service.metrics.shrinking import Lines, Shrink

KNOWN_REQUESTS = 64
"""Newest requests of clients that are recognised when they are repeated."""
_KNOWN_COMMANDS = 1024
"""Newest commands of each kind that are recognised: as many as may have no answer yet."""
_INDEXED_LINES = 256
"""The position of one line in so many is in memory."""
_REST = 7 / 8
"""The part of its largest size that a file may have after it was rewritten: thinning its older half leaves 3/4."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_HEADS = msgspec.json.Decoder(Stored)
_log = get_logger(__name__)
R = TypeVar("R", bound=Stored)


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """What a file has of a client's request."""

    lines: int
    number: int
    """Number of the last of them."""


@dataclass(slots=True)
class _Content:
    """What is known of the lines that are there."""

    end: int = 0
    """Where the last whole line ends, in bytes."""
    newest: int = 0
    """Highest number that was given."""
    lines: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    """Number and position of one line in `_INDEXED_LINES`, in order."""
    requests: OrderedDict[str, KnownRequest] = field(default_factory=OrderedDict)
    commands: dict[str, OrderedDict[int, None]] = field(default_factory=dict)
    """The commands that lines are about, by RPC."""

    def add(self, line: Stored, offset: int, size: int) -> None:
        if self.lines % _INDEXED_LINES == 0:
            self.places.append((line.number, offset))
        self.lines += 1
        self.newest = max(self.newest, line.number)
        self.end = offset + size
        if line.request_id:
            before = self.requests.get(line.request_id, KnownRequest(0, 0))
            self.requests[line.request_id] = KnownRequest(before.lines + 1, line.number)
            if len(self.requests) > KNOWN_REQUESTS:
                self.requests.popitem(last=False)
        if line.seq_id:
            known = self.commands.setdefault(line.command, OrderedDict())
            known[line.seq_id] = None
            if len(known) > _KNOWN_COMMANDS:
                known.popitem(last=False)


class LogFile(Generic[R]):
    """The rows of one kind of a run. Thread-safe for reading; one thread at a time may write."""

    def __init__(self, path: Path, kind: type[R], most: int, shrink: Shrink, guard: DiskGuard, tenant: str) -> None:
        """Read and write rows of `kind`. Beyond `most` bytes, `shrink` says which stay. `tenant` owns the run."""
        self.path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._most = most
        self._shrink = shrink
        self._guard = guard
        self._tenant = tenant
        self._content: _Content | None = None
        self._lock = threading.Lock()
        """Held while the content is read for the first time, or changes."""
        self._is_new = False
        """Whether the file's name may not be durable yet."""

    def request(self, request_id: str) -> KnownRequest:
        """Return what the file has of a request. Raises OSError."""
        with self._lock:
            return self._known().requests.get(request_id, KnownRequest(0, 0))

    def has_command(self, command: str, seq_id: int) -> bool:
        """Return whether the file has a row about a command, which is one of the newest. Raises OSError."""
        with self._lock:
            return seq_id in self._known().commands.get(command, ())

    def newest_command(self, command: str) -> int:
        """Return the highest seq_id of the commands of an RPC that rows are about; 0 if none is. Raises OSError."""
        with self._lock:
            return max(self._known().commands.get(command, ()), default=0)

    def append(self, rows: Sequence[R]) -> int:
        """Append rows, with the next numbers; return the last. Raises DiskFull, QuotaExceeded, OSError.

        They outlive this process when this returns, and a power cut after the next `sync`. If it raises, none is there.
        """
        with self._lock:
            content = self._known()
            if _size_of(self.path) < content.end:  # somebody has cut or removed it; numbers are not used again
                content = self._content = self._read(content.newest)
            numbered = [
                msgspec.structs.replace(row, number=content.newest + place) for place, row in enumerate(rows, start=1)
            ]
            lines = [msgspec.json.encode(row) + b"\n" for row in numbered]
            data = b"".join(lines)
            self._guard.check_free(self.path.parent, len(data))
            self._guard.check_quota(self._tenant, len(data))
            self._write(content, data)
            for row, line in zip(numbered, lines, strict=True):
                content.add(row, content.end, len(line))
            newest, is_full = content.newest, content.end > self._most
        if is_full:
            self._rewrite()
        self._guard.measure(self.path)
        return newest

    def sync(self) -> None:
        """Make what was appended durable. Raises OSError, FileNotFoundError if the run is deleted."""
        layout.sync_file(self.path)
        if self._is_new:
            layout.sync_directory(self.path.parent)
            self._is_new = False

    def opened(self, after: int = 0) -> LogReader[R]:
        """Open the file to read the rows with higher numbers than `after`, as of now. Close the reader.

        It reads the same rows also when the file is rewritten meanwhile. Raises OSError.
        """
        with self._lock:
            content = self._known()
            place = bisect_right(content.places, after, key=lambda known: known[0]) - 1
            start = content.places[place][1] if place >= 0 else 0
            if after >= content.newest or start >= content.end:
                return LogReader(self._decoder, BytesIO())
            with suppress(FileNotFoundError):
                return LogReader(self._decoder, open_file(self.path), start, content.end, after)
        return LogReader(self._decoder, BytesIO())

    def _known(self) -> _Content:
        """Return what is known of the lines; read them first if nothing is. Only while the lock is held."""
        if self._content is None:
            self._content = self._read(0)
        return self._content

    def _read(self, newest: int) -> _Content:
        content = _Content(newest=newest)
        with suppress(FileNotFoundError), open_file(self.path) as file:
            for offset, line in whole_lines(file, 0):
                if (head := _head_of(line)) is not None:
                    content.add(head, offset, len(line))
        return content

    def _write(self, content: _Content, data: bytes) -> None:
        """Write after the last whole line. Raises DiskFull, OSError; nothing is there then."""
        try:
            descriptor = os.open(self.path, _FLAGS, 0o666)
        except OSError as error:
            raise layout.translate_os_error(error) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is no regular file", str(self.path))
            self._is_new |= not status.st_size
            os.ftruncate(descriptor, content.end)
            os.lseek(descriptor, content.end, os.SEEK_SET)
            try:
                layout.write_all(descriptor, data)
            except OSError as error:
                os.ftruncate(descriptor, content.end)
                raise layout.translate_os_error(error) from error
        finally:
            os.close(descriptor)

    def _rewrite(self) -> None:
        """Write the file again without the lines that it has no room for. It stays as it is if that fails."""
        sizes, steps, of_trainer = array("Q"), array("q"), bytearray()
        with open_file(self.path) as file:
            for _, line in whole_lines(file, 0):
                head = _head_of(line)
                sizes.append(len(line))
                steps.append(-1 if head is None else head.step)
                of_trainer.append(head is not None and head.source is RowSource.TRAINER)
            keep = self._shrink(Lines(sizes, steps, of_trainer), int(self._most * _REST))
            try:
                with layout.new_file(self.path) as new:
                    for (_, line), is_kept in zip(whole_lines(file, 0), keep, strict=False):
                        if is_kept:
                            new.write(line)
            except (errors.DiskFull, OSError) as error:
                _log.warning("a run's metrics are not made shorter", file=str(self.path), error=str(error))
                return
        with self._lock:
            self._content = self._read(self._known().newest)


def _head_of(line: bytes) -> Stored | None:
    """Return what a line has of `Stored`; None for one that cannot be read, as a crash may leave it."""
    try:
        return _HEADS.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
