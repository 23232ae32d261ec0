"""A SQLite database of the HTTP APIs.

A write returns once it is in the file, so a killed process does not lose it. Writes queued at the same time share one
transaction.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gateway.http.state import StateUnusable, check_kind, in_state, trouble_of
from paceline import errors

_MOST_TOGETHER = 256
_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""How the names of the files end that SQLite opens for a database."""
T = TypeVar("T")


class Database:
    """The database. Reads are quick and run on the calling thread; writes are awaited."""

    def __init__(self, path: Path, version: int, tables: str, *, survives_power_cuts: bool = False) -> None:
        """Open the file or create it with these tables.

        Raises StateUnusable, and InvalidArgument if its format is not `version`.
        """
        self._path = path
        self.trouble: StateUnusable | None = None
        """Why a read or the last write failed; None if it did not."""
        self._is_closed = False
        with ExitStack() as undo:
            for suffix in _SUFFIXES:
                file = path.with_name(path.name + suffix)
                with in_state(file):
                    check_kind(file)
            with in_state(path):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._read = _connect(path, undo)
                self._prepare(version, tables)
                self._write = _connect(path, undo)
                if survives_power_cuts:
                    self._write.execute("PRAGMA synchronous = FULL")
                path.chmod(0o600)
            undo.pop_all()
        self._jobs: queue.SimpleQueue[_DatabaseJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=path.stem, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the queued work and close the file."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join()
        self._read.close()
        self._write.close()

    def _prepare(self, version: int, tables: str) -> None:
        (found,) = self._read.execute("PRAGMA user_version").fetchone()
        if found not in {0, version}:
            message = (
                f"{self._path} is of format {found}, and this release reads {version}; start the release that wrote it"
            )
            raise errors.InvalidArgument(message, field="http_state")
        if found == 0:
            self._read.executescript(f"BEGIN; {tables} PRAGMA user_version = {version}; COMMIT;")

    async def write(self, sql: str, *values: object) -> int:
        """Run a statement that writes and return the number of rows it changed. Raises StateUnusable."""
        return await self.do(lambda connection: connection.execute(sql, values).rowcount)

    async def do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run statements in one transaction. Raises StateUnusable."""
        if self._is_closed:
            raise StateUnusable(f"{self._path} is closed; send the request again")
        loop = asyncio.get_running_loop()
        job = _DatabaseJob(work, loop, loop.create_future())
        self._jobs.put(job)
        return await job.outcome  # type: ignore[no-any-return]

    def rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """Return the rows that a query finds. Raises StateUnusable."""
        if self._is_closed:
            raise StateUnusable(f"{self._path} is closed; send the request again")
        try:
            return self._read.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def row(self, sql: str, *values: object) -> sqlite3.Row | None:
        """Return the first row that a query finds, or None."""
        return next(iter(self.rows(sql, *values)), None)

    def _work(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            while len(jobs) < _MOST_TOGETHER and not self._jobs.empty():
                jobs.append(self._jobs.get())
            asked = [job for job in jobs if job is not None]
            if asked:
                self._run(asked)
            if len(asked) < len(jobs):
                return

    def _run(self, jobs: list[_DatabaseJob]) -> None:
        """Run jobs in one transaction; a job that fails does not affect the others."""
        outcomes: list[tuple[_DatabaseJob, Any, BaseException | None]] = []
        first: sqlite3.Error | None = None
        try:
            self._write.execute("BEGIN IMMEDIATE")
            for job in jobs:
                self._write.execute("SAVEPOINT job")
                try:
                    outcomes.append((job, job.work(self._write), None))
                except sqlite3.Error as error:
                    first = first or error
                    outcomes.append((job, None, self._failure(error)))
                    self._write.execute("ROLLBACK TO job")  # fails if SQLite has ended the transaction itself
                except Exception as error:  # reported to the job's caller
                    self._write.execute("ROLLBACK TO job")
                    outcomes.append((job, None, error))
                self._write.execute("RELEASE job")
            self._write.execute("COMMIT")
            if first is None and not (self.trouble and self.trouble.is_damage):
                self.trouble = None
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):  # of the same cause: this thread goes on, for when it is over
                if self._write.in_transaction:
                    self._write.execute("ROLLBACK")
            failure = self._failure(first or error)
            outcomes = [(job, None, failure) for job in jobs]
        for job, value, problem in outcomes:
            job.loop.call_soon_threadsafe(_resolve, job.outcome, value, problem)

    def _failure(self, error: sqlite3.Error) -> Exception:
        """Return what a caller is told of an error, and note it if it is of the file or its disk."""
        trouble = trouble_of(self._path, error)
        if trouble is not None and not (self.trouble and self.trouble.is_damage):
            self.trouble = trouble
        return trouble or error


@dataclass(frozen=True, slots=True)
class _DatabaseJob:
    work: Callable[[sqlite3.Connection], Any]
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]


def _resolve(outcome: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(value)
    else:
        outcome.set_exception(error)


def _connect(path: Path, undo: ExitStack) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    undo.callback(connection.close)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # set before the first table; lets the file shrink
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA journal_size_limit = {64 << 20}")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
