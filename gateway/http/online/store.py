"""The persistent state of online training: models, their examples, and unanswered commands.

A command is stored before it is sent. An unanswered command is sent again unchanged, by this gateway or the next, and
the trainer executes it once. So each example is trained on once, whichever process is killed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, takewhile
from pathlib import Path
from time import time
from typing import Any

from gateway.http.database import Database
from paceline import errors

FORMAT = 1
MOST_WAITING_BYTES = 1 << 30
"""Most bytes of a tenant's examples that are not trained on yet."""
MOST_SETTLED = 1_000_000
"""Settled examples of a tenant that are known again when they are posted again, those that were posted last."""
TRIM_EVERY = 10_000
"""Examples of a tenant that are settled between two deletions of those beyond."""
MOST_MODELS = 1_000
"""Models of a tenant."""
_MOST_DATUMS = 256
"""Most datums of a batch; a single example may have more."""

_TABLES = """
CREATE TABLE models (model_id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, name TEXT NOT NULL,
    request_id TEXT NOT NULL, run_id TEXT NOT NULL DEFAULT '', optimizer TEXT NOT NULL, lora TEXT NOT NULL,
    created REAL NOT NULL, attachment INTEGER NOT NULL DEFAULT 0, next_seq_id INTEGER NOT NULL DEFAULT 0,
    step INTEGER NOT NULL DEFAULT 0, version INTEGER NOT NULL DEFAULT 0, loss REAL, tokens INTEGER NOT NULL DEFAULT 0,
    stopped TEXT NOT NULL DEFAULT '', waiting INTEGER NOT NULL DEFAULT 0, waiting_bytes INTEGER NOT NULL DEFAULT 0,
    trained INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, problem TEXT NOT NULL DEFAULT '',
    UNIQUE (tenant, name));
CREATE TABLE examples (number INTEGER PRIMARY KEY AUTOINCREMENT, model_id INTEGER NOT NULL, digest BLOB NOT NULL,
    state INTEGER NOT NULL, learning_rate REAL NOT NULL, batch_size INTEGER NOT NULL, datums INTEGER NOT NULL,
    data BLOB, batch INTEGER, UNIQUE (model_id, digest));
CREATE INDEX examples_by_state ON examples (model_id, state, number);
CREATE INDEX examples_by_batch ON examples (model_id, batch);
CREATE TABLE commands (model_id INTEGER NOT NULL, seq_id INTEGER NOT NULL, kind TEXT NOT NULL, batch INTEGER NOT NULL,
    request BLOB NOT NULL, PRIMARY KEY (model_id, seq_id));
"""


class ExampleState(IntEnum):
    """Progress of an example."""

    WAITING = 0
    SENT = 1
    TRAINED = 2
    FAILED = 3
    """It had no effect and may be posted again."""
    UNSURE = 4
    """Its gradient was computed but this gateway's step was not taken; another client's step may have applied it."""


@dataclass(frozen=True, slots=True)
class OnlineModel:
    """A run that is trained on posted examples."""

    model_id: int
    tenant: str
    name: str
    request_id: str
    """The request_id of the call that creates its run."""
    run_id: str
    """Empty until the run is created."""
    optimizer: str
    lora: Mapping[str, Any]
    """rank and alpha; empty if all parameters are trained."""
    created: float
    attachment: int
    next_seq_id: int
    step: int
    version: int
    """Newest published version."""
    loss: float | None
    """Mean over the tokens of the last batch."""
    tokens: int
    """Tokens trained on so far."""
    stopped: str
    """Why training is stopped until more is posted; empty if it is not stopped."""
    waiting: int
    """Examples that wait or are in flight."""
    waiting_bytes: int
    trained: int
    failed: int
    problem: str
    """Why the most recently failed examples failed."""


@dataclass(frozen=True, slots=True)
class NewExample:
    """A posted example. `data` is a serialized list of Datum (a ForwardBackwardRequest with nothing else)."""

    digest: bytes
    datums: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Example:
    """A waiting example and its training settings."""

    number: int
    learning_rate: float
    batch_size: int
    datums: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredCommand:
    """A command of a run, sent until it is answered."""

    seq_id: int
    kind: str
    batch: int
    """The seq_id of the ForwardBackward that carries its examples; 0 if it concerns no examples."""
    request: bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of a batch's examples."""

    state: ExampleState
    problem: str = ""


class OnlineStore(Database):
    """The database. It survives power cuts, as the trainer's journal does."""

    def __init__(self, path: Path, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        """Open or create the file. Raises InvalidArgument for another format or an unusable file."""
        super().__init__(path, FORMAT, _TABLES, survives_power_cuts=True)
        self._most_waiting_bytes = most_waiting_bytes

    def model(self, tenant: str, name: str) -> OnlineModel | None:
        """Return the model with a name, or None."""
        row = self.row("SELECT * FROM models WHERE tenant = ? AND name = ?", tenant, name)
        return _model(row) if row else None

    def models(self, tenant: str | None = None) -> list[OnlineModel]:
        """Return a tenant's models, or those of all tenants, oldest first."""
        sql = "SELECT * FROM models WHERE tenant = ?1 OR ?1 IS NULL ORDER BY model_id"
        return [_model(row) for row in self.rows(sql, tenant)]

    def again(self, model: OnlineModel) -> OnlineModel:
        """Return the current state of a model. Raises ModelNotFound if it was removed."""
        row = self.row("SELECT * FROM models WHERE model_id = ?", model.model_id)
        if row is None:
            raise errors.ModelNotFound("the model was deleted and created again; try again", field="model")
        return _model(row)

    def check_waiting(self, tenant: str, size: int) -> None:
        """Raise Overloaded unless examples of `size` bytes may wait, with those of the tenant that wait already."""
        _check_waiting(self._read, tenant, size, self._most_waiting_bytes)

    async def add_model(
        self,
        tenant: str,
        name: str,
        request_id: str,
        optimizer: str,
        lora: Mapping[str, Any],
        instead_of: OnlineModel | None = None,
    ) -> OnlineModel:
        """Store a new model, which has no run yet; with the waiting examples of the model that it replaces, if any.

        Raises QuotaExceeded if it replaces none and the tenant has MOST_MODELS.
        """

        def add(connection: sqlite3.Connection) -> None:
            ((count,),) = connection.execute("SELECT COUNT(*) FROM models WHERE tenant = ?", (tenant,)).fetchall()
            if count >= MOST_MODELS and instead_of is None:
                raise errors.QuotaExceeded(
                    f"this tenant has {count} models, as many as it may have: delete the runs of some, or post to one",
                    field="model",
                    metadata={"quota": "online_models", "used": str(count), "limit": str(MOST_MODELS)},
                )
            if instead_of is not None:
                connection.execute("DELETE FROM models WHERE model_id = ?", (instead_of.model_id,))
            sql = "INSERT INTO models (tenant, name, request_id, optimizer, lora, created) VALUES (?, ?, ?, ?, ?, ?)"
            values = (tenant, name, request_id, optimizer, json.dumps(lora), time())
            model_id = connection.execute(sql, values).lastrowid
            if instead_of is not None:
                sql = "UPDATE examples SET model_id = ? WHERE model_id = ? AND state = ?"
                connection.execute(sql, (model_id, instead_of.model_id, ExampleState.WAITING))
                connection.execute(
                    "UPDATE models SET (waiting, waiting_bytes) = (SELECT COUNT(*), COALESCE(SUM(LENGTH(data)), 0) "
                    "FROM examples WHERE model_id = ?1) WHERE model_id = ?1",
                    (model_id,),
                )
                _forget(connection, instead_of)

        await self.do(add)
        found = self.model(tenant, name)
        assert found is not None  # noqa: S101 - it was just written
        return found

    async def attach(self, model: OnlineModel, run_id: str, attachment: int, next_seq_id: int) -> None:
        """Record the run and the number of its next command, and clear `stopped`."""
        sql = "UPDATE models SET run_id = ?, attachment = ?, next_seq_id = ?, stopped = '' WHERE model_id = ?"
        await self.write(sql, run_id, attachment, next_seq_id, model.model_id)

    async def forget_model(self, model: OnlineModel) -> None:
        """Remove a model with its examples and commands."""
        await self.do(lambda connection: _forget(connection, model))

    async def add_examples(
        self, model: OnlineModel, examples: Sequence[NewExample], learning_rate: float, batch_size: int
    ) -> int:
        """Store the examples that are new or failed before; return their number. Raises Overloaded, as check_waiting.

        Nothing is stored then. It is checked here again because other requests may have stored theirs since.
        """

        def add(connection: sqlite3.Connection) -> int:
            added = size = again = 0
            for example in examples:
                mine = (model.model_id, example.digest)
                sql = "DELETE FROM examples WHERE model_id = ? AND digest = ? AND state = ?"
                again += connection.execute(sql, (*mine, ExampleState.FAILED)).rowcount
                is_new = connection.execute(
                    "INSERT OR IGNORE INTO examples (model_id, digest, state, learning_rate, batch_size, datums, data) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*mine, ExampleState.WAITING, learning_rate, batch_size, example.datums, example.data),
                ).rowcount
                added += is_new
                size += is_new * len(example.data)
            if size:
                _check_waiting(connection, model.tenant, size, self._most_waiting_bytes)
            connection.execute(
                "UPDATE models SET waiting = waiting + ?, waiting_bytes = waiting_bytes + ?, failed = failed - ? "
                "WHERE model_id = ?",
                (added, size, again, model.model_id),
            )
            return added

        return await self.do(add)

    async def next_batch(self, model: OnlineModel, most_bytes: int) -> list[Example]:
        """Return the longest-waiting examples posted with the same settings; at least one if any waits.

        Only these are loaded, in the database's thread, because examples may be large.
        """
        where = "FROM examples WHERE model_id = ? AND state = ? ORDER BY number LIMIT ?"
        mine = (model.model_id, ExampleState.WAITING)

        def load(connection: sqlite3.Connection) -> list[Example]:
            sql = f"SELECT learning_rate, batch_size, datums, LENGTH(data) AS size {where}"
            first = connection.execute(sql, (*mine, 1)).fetchone()
            if first is None:
                return []
            rows = connection.execute(sql, (*mine, first["batch_size"])).fetchall()
            together = list(takewhile(lambda row: row[:2] == first[:2], rows))
            sizes = accumulate(row["size"] for row in together)
            datums = accumulate(row["datums"] for row in together)
            fitting = sum(a <= most_bytes and b <= _MOST_DATUMS for a, b in zip(sizes, datums, strict=True))
            sql = f"SELECT number, learning_rate, batch_size, datums, data {where}"
            return [Example(*row) for row in connection.execute(sql, (*mine, max(1, fitting)))]

        return await self.do(load)

    def commands(self, model: OnlineModel) -> list[StoredCommand]:
        """Return the unanswered commands in order."""
        sql = "SELECT seq_id, kind, batch, request FROM commands WHERE model_id = ? ORDER BY seq_id"
        return [StoredCommand(*row) for row in self.rows(sql, model.model_id)]

    async def issue(
        self, model: OnlineModel, commands: Sequence[StoredCommand], examples: Sequence[Example] = ()
    ) -> None:
        """Store commands to send, numbered from the model's next, and record which examples the first one carries."""

        def issue(connection: sqlite3.Connection) -> None:
            _store_commands(connection, model, commands, commands[0].seq_id)
            connection.executemany(
                "UPDATE examples SET state = ?, batch = ? WHERE number = ?",
                [(ExampleState.SENT, commands[0].batch, example.number) for example in examples],
            )

        await self.do(issue)

    async def answered(
        self, model: OnlineModel, command: StoredCommand, settled: Settled | None = None, **columns: float
    ) -> None:
        """Remove an answered command; record the outcome of its examples and `columns` of the model.

        `tokens` are added to the stored count.
        """

        def answered(connection: sqlite3.Connection) -> None:
            sql = "DELETE FROM commands WHERE model_id = ? AND seq_id = ?"
            connection.execute(sql, (model.model_id, command.seq_id))
            for name, value in columns.items():
                new = "tokens + ?" if name == "tokens" else "?"
                sql = f"UPDATE models SET {name} = {new} WHERE model_id = ?"  # noqa: S608 - our own column names
                connection.execute(sql, (value, model.model_id))
            if settled is not None:
                _end_examples(connection, model, command.batch, settled)

        await self.do(answered)

    async def unread(
        self, model: OnlineModel, problem: str, command: StoredCommand, instead: Sequence[StoredCommand] = ()
    ) -> int:
        """Take back the commands of a batch whose first the trainer refused unread: their numbers stay free.

        A batch of several examples waits again, to be split. A single example failed, and `instead`, numbered from the
        refused command's number, is stored to be sent. Returns the bytes of the examples that wait again.
        """

        def take_back(connection: sqlite3.Connection) -> int:
            sql = "DELETE FROM commands WHERE model_id = ? AND seq_id >= ?"
            connection.execute(sql, (model.model_id, command.seq_id))
            count, size = _in_flight(connection, model, command.batch)
            is_split = count > 1
            settled = Settled(ExampleState.WAITING) if is_split else Settled(ExampleState.FAILED, problem)
            _end_examples(connection, model, command.batch, settled)
            _store_commands(connection, model, () if is_split else instead, command.seq_id)
            return size if is_split else 0

        return await self.do(take_back)

    async def stop(self, model: OnlineModel, problem: str, command: StoredCommand, settled: Settled) -> None:
        """Record why a model's training stops, drop its unanswered commands, and settle the batch's examples."""

        def stop(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM commands WHERE model_id = ?", (model.model_id,))
            connection.execute("UPDATE models SET stopped = ? WHERE model_id = ?", (problem, model.model_id))
            _end_examples(connection, model, command.batch, settled)

        await self.do(stop)


def _forget(connection: sqlite3.Connection, model: OnlineModel) -> None:
    for table in ("commands", "examples", "models"):
        connection.execute(f"DELETE FROM {table} WHERE model_id = ?", (model.model_id,))  # noqa: S608


def _check_waiting(connection: sqlite3.Connection, tenant: str, size: int, most: int) -> None:
    sql = "SELECT COALESCE(SUM(waiting_bytes), 0) FROM models WHERE tenant = ?"
    ((waiting,),) = connection.execute(sql, (tenant,)).fetchall()
    if waiting + size > most:
        message = "too many examples are waiting; send more once some are trained on"
        raise errors.Overloaded(message, field="conversations", retry_after=60.0)


def _store_commands(
    connection: sqlite3.Connection, model: OnlineModel, commands: Sequence[StoredCommand], first: int
) -> None:
    """Store commands to send, numbered from `first`, and the number of the command after them."""
    sql = "UPDATE models SET next_seq_id = ? WHERE model_id = ?"
    connection.execute(sql, (first + len(commands), model.model_id))
    connection.executemany(
        "INSERT INTO commands VALUES (?, ?, ?, ?, ?)",
        [(model.model_id, each.seq_id, each.kind, each.batch, each.request) for each in commands],
    )


def _in_flight(connection: sqlite3.Connection, model: OnlineModel, batch: int) -> tuple[int, int]:
    """Return the number of a batch's examples in flight, and their bytes."""
    sql = "SELECT COUNT(*), COALESCE(SUM(LENGTH(data)), 0) FROM examples WHERE model_id = ? AND batch = ? AND state = ?"
    count, size = connection.execute(sql, (model.model_id, batch, ExampleState.SENT)).fetchone()
    return int(count), int(size)


def _end_examples(connection: sqlite3.Connection, model: OnlineModel, batch: int, settled: Settled) -> None:
    """Set the state of a batch's examples in flight. Only waiting examples keep their data."""
    mine = (model.model_id, batch, ExampleState.SENT)
    where = "WHERE model_id = ? AND batch = ? AND state = ?"
    count, size = _in_flight(connection, model, batch)
    if settled.state is ExampleState.WAITING:
        connection.execute(f"UPDATE examples SET state = ? {where}", (settled.state, *mine))  # noqa: S608
        return
    connection.execute(f"UPDATE examples SET state = ?, data = NULL {where}", (settled.state, *mine))  # noqa: S608
    total = "trained" if settled.state is ExampleState.TRAINED else "failed"
    sql = (
        f"UPDATE models SET {total} = {total} + ?, waiting = waiting - ?, waiting_bytes = waiting_bytes - ? "  # noqa: S608
        "WHERE model_id = ?"
    )
    connection.execute(sql, (count, count, size, model.model_id))
    if settled.problem and count:
        connection.execute("UPDATE models SET problem = ? WHERE model_id = ?", (settled.problem, model.model_id))
    sql = "SELECT COALESCE(SUM(trained + failed), 0) FROM models WHERE tenant = ?"
    ((ended,),) = connection.execute(sql, (model.tenant,)).fetchall()
    if ended // TRIM_EVERY != (ended - count) // TRIM_EVERY:
        _trim_settled(connection, model.tenant)


def _trim_settled(connection: sqlite3.Connection, tenant: str) -> None:
    """Delete all but a tenant's newest settled examples."""
    settled = (ExampleState.TRAINED, ExampleState.FAILED, ExampleState.UNSURE)
    # Counted by the index, but found by their numbers, oldest first (+ keeps the index out): nothing is sorted.
    where = "WHERE {}model_id IN (SELECT model_id FROM models WHERE tenant = ?) AND {}state IN (?, ?, ?)"
    sql = f"SELECT COUNT(*) FROM examples {where.format('', '')}"  # noqa: S608
    ((count,),) = connection.execute(sql, (tenant, *settled)).fetchall()
    sql = f"SELECT number FROM examples {where.format('+', '+')} ORDER BY number LIMIT ?"  # noqa: S608
    found = connection.execute(sql, (tenant, *settled, max(0, count - MOST_SETTLED))).fetchall()
    connection.executemany("DELETE FROM examples WHERE number = ?", found)


def _model(row: sqlite3.Row) -> OnlineModel:
    return OnlineModel(**{**dict(row), "lora": json.loads(row["lora"])})
