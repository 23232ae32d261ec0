"""What online training has to remember: models, their examples, and the commands that have no answer yet.

A command is here before it is sent. One without an answer is sent again as it was, by this gateway or the next, and the
trainer executes it once: so each example is trained on once, whatever is killed.
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

FORMAT = 1
_MOST_BATCH_BYTES = 16 << 20
"""Of a call to the trainer."""

_TABLES = """
CREATE TABLE models (model_id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, request_id TEXT NOT NULL,
    run_id TEXT NOT NULL, optimizer TEXT NOT NULL, lora TEXT NOT NULL, created REAL NOT NULL,
    attachment INTEGER NOT NULL, next_seq_id INTEGER NOT NULL, step INTEGER NOT NULL, version INTEGER NOT NULL,
    loss REAL, tokens INTEGER NOT NULL, stopped TEXT NOT NULL, UNIQUE (tenant, name));
CREATE TABLE examples (number INTEGER PRIMARY KEY, model_id INTEGER NOT NULL, digest BLOB NOT NULL,
    state INTEGER NOT NULL, learning_rate REAL NOT NULL, batch_size INTEGER NOT NULL, data BLOB, seq_id INTEGER,
    problem TEXT, UNIQUE (model_id, digest));
CREATE INDEX examples_of_model ON examples (model_id, state, number);
CREATE TABLE commands (model_id INTEGER NOT NULL, seq_id INTEGER NOT NULL, kind TEXT NOT NULL, request BLOB NOT NULL,
    PRIMARY KEY (model_id, seq_id));
"""


class ExampleState(IntEnum):
    """How far an example is."""

    WAITING = 0
    SENT = 1
    TRAINED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class OnlineModel:
    """A run that is trained on what is posted."""

    model_id: int
    tenant: str
    name: str
    request_id: str
    """Of the call that makes its run."""
    run_id: str
    """Empty until the run is made."""
    optimizer: str
    lora: Mapping[str, Any]
    """rank and alpha; empty where all parameters are trained."""
    created: float
    attachment: int
    next_seq_id: int
    step: int
    version: int
    """Newest that was published."""
    loss: float | None
    """Mean over the tokens of the last batch."""
    tokens: int
    """Trained on so far."""
    stopped: str
    """Why it is not trained until more is posted; empty where it is."""


@dataclass(frozen=True, slots=True)
class NewExample:
    """What is to be trained on: `data` is a serialized list of Datum (a ForwardBackwardRequest with nothing else)."""

    digest: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class Example:
    """One that waits, and how it is to be trained on."""

    number: int
    learning_rate: float
    batch_size: int
    data: bytes

    def goes_with(self, other: Example) -> bool:
        """Whether the two can be in one batch."""
        return (self.learning_rate, self.batch_size) == (other.learning_rate, other.batch_size)


@dataclass(frozen=True, slots=True)
class Command:
    """A request of a run that is sent until it is answered."""

    seq_id: int
    kind: str
    request: bytes


class OnlineStore(Database):
    """The file. It survives power cuts, as the trainer's journal does."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises InvalidArgument where it is of a later format, or no such file."""
        super().__init__(path, FORMAT, _TABLES, survives_power_cuts=True)

    def model(self, tenant: str, name: str) -> OnlineModel | None:
        """Return a model by its name, if there is one."""
        for row in self.rows("SELECT * FROM models WHERE tenant = ? AND name = ?", tenant, name):
            return _model(row)
        return None

    def models(self) -> list[OnlineModel]:
        """Return all models of all tenants."""
        return [_model(row) for row in self.rows("SELECT * FROM models")]

    def again(self, model: OnlineModel) -> OnlineModel:
        """Return a model as it is now."""
        (row,) = self.rows("SELECT * FROM models WHERE model_id = ?", model.model_id)
        return _model(row)

    async def add_model(
        self, tenant: str, name: str, request_id: str, optimizer: str, lora: Mapping[str, Any]
    ) -> OnlineModel:
        """Keep a new model, which has no run yet, or return the one of that name."""
        await self.write(
            "INSERT OR IGNORE INTO models (tenant, name, request_id, run_id, optimizer, lora, created, attachment, "
            "next_seq_id, step, version, tokens, stopped) VALUES (?, ?, ?, '', ?, ?, ?, 0, 0, 0, 0, 0, '')",
            tenant,
            name,
            request_id,
            optimizer,
            json.dumps(lora),
            time(),
        )
        found = self.model(tenant, name)
        assert found is not None  # noqa: S101 - it was just written
        return found

    async def attach(self, model: OnlineModel, run_id: str, attachment: int, next_seq_id: int) -> None:
        """Note the run, and the number of its next command."""
        sql = "UPDATE models SET run_id = ?, attachment = ?, next_seq_id = ?, stopped = '' WHERE model_id = ?"
        await self.write(sql, run_id, attachment, next_seq_id, model.model_id)

    async def forget_model(self, model: OnlineModel) -> None:
        """Remove a model whose run is gone, with its examples."""

        def forget(connection: sqlite3.Connection) -> None:
            for table in ("commands", "examples", "models"):
                connection.execute(f"DELETE FROM {table} WHERE model_id = ?", (model.model_id,))  # noqa: S608

        await self.do(forget)

    async def add_examples(
        self, model: OnlineModel, examples: Sequence[NewExample], learning_rate: float, batch_size: int
    ) -> int:
        """Keep examples that are new, or that failed before; return how many those are."""

        def add(connection: sqlite3.Connection) -> int:
            added = 0
            for example in examples:
                mine = (model.model_id, example.digest)
                sql = "DELETE FROM examples WHERE model_id = ? AND digest = ? AND state = ?"
                connection.execute(sql, (*mine, ExampleState.FAILED))
                added += connection.execute(
                    "INSERT OR IGNORE INTO examples (model_id, digest, state, learning_rate, batch_size, data) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    (*mine, ExampleState.WAITING, learning_rate, batch_size, example.data),
                ).rowcount
            return added

        return await self.do(add)

    def counts(self, model: OnlineModel) -> dict[ExampleState, int]:
        """Return how many examples a model has in each state."""
        sql = "SELECT state, COUNT(*) FROM examples WHERE model_id = ? GROUP BY state"
        found = {row[0]: row[1] for row in self.rows(sql, model.model_id)}
        return {state: found.get(state, 0) for state in ExampleState}

    def waiting_bytes(self, tenant: str) -> int:
        """Return what a tenant's examples take that are not trained on yet."""
        ((total,),) = self.rows(
            "SELECT COALESCE(SUM(LENGTH(data)), 0) FROM examples JOIN models USING (model_id) "
            "WHERE tenant = ? AND state IN (?, ?)",
            tenant,
            ExampleState.WAITING,
            ExampleState.SENT,
        )
        return int(total)

    def last_problem(self, model: OnlineModel) -> str:
        """Return why the last example failed that did; empty where none did."""
        sql = "SELECT problem FROM examples WHERE model_id = ? AND state = ? ORDER BY seq_id DESC LIMIT 1"
        return next((row[0] for row in self.rows(sql, model.model_id, ExampleState.FAILED)), "")

    def next_batch(self, model: OnlineModel) -> list[Example]:
        """Return the examples that wait longest and were posted with the same settings."""
        sql = "SELECT * FROM examples WHERE model_id = ? AND state = ? ORDER BY number LIMIT ?"
        for first in self.rows(sql, model.model_id, ExampleState.WAITING, 1):
            rows = self.rows(sql, model.model_id, ExampleState.WAITING, first["batch_size"])
            found = [Example(row["number"], row["learning_rate"], row["batch_size"], row["data"]) for row in rows]
            batch = list(takewhile(found[0].goes_with, found))
            sizes = accumulate(len(example.data) for example in batch)
            return batch[: max(1, sum(size <= _MOST_BATCH_BYTES for size in sizes))]
        return []

    def commands(self, model: OnlineModel) -> list[Command]:
        """Return the commands without an answer, in their order."""
        sql = "SELECT seq_id, kind, request FROM commands WHERE model_id = ? ORDER BY seq_id"
        return [Command(*row) for row in self.rows(sql, model.model_id)]

    async def issue(self, model: OnlineModel, commands: Sequence[Command], examples: Sequence[Example] = ()) -> None:
        """Keep commands to be sent, numbered from the model's next, and note which examples the first one carries."""

        def issue(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE models SET next_seq_id = ? WHERE model_id = ?", (commands[-1].seq_id + 1, model.model_id)
            )
            connection.executemany(
                "INSERT INTO commands VALUES (?, ?, ?, ?)",
                [(model.model_id, each.seq_id, each.kind, each.request) for each in commands],
            )
            connection.executemany(
                "UPDATE examples SET state = ?, seq_id = ? WHERE number = ?",
                [(ExampleState.SENT, commands[0].seq_id, example.number) for example in examples],
            )

        await self.do(issue)

    async def answered(self, model: OnlineModel, command: Command, **facts: float) -> None:
        """Let an answered command go, and note what is known of the model since (columns of its table)."""

        def answered(connection: sqlite3.Connection) -> None:
            sql = "DELETE FROM commands WHERE model_id = ? AND seq_id = ?"
            connection.execute(sql, (model.model_id, command.seq_id))
            for name, value in facts.items():
                sql = f"UPDATE models SET {name} = ? WHERE model_id = ?"  # noqa: S608 - names of ours
                connection.execute(sql, (value, model.model_id))

        await self.do(answered)

    async def settle(self, model: OnlineModel, state: ExampleState, problem: str = "") -> None:
        """Say of the examples that were sent what became of them. Only those that wait keep their data."""
        kept = "data" if state is ExampleState.WAITING else "NULL"
        sql = f"UPDATE examples SET state = ?, problem = ?, data = {kept} WHERE model_id = ? AND state = ?"  # noqa: S608
        await self.write(sql, state, problem, model.model_id, ExampleState.SENT)

    async def stop(self, model: OnlineModel, problem: str) -> None:
        """Note why a model is not trained further, and give up what it had under way."""

        def stop(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM commands WHERE model_id = ?", (model.model_id,))
            connection.execute("UPDATE models SET stopped = ? WHERE model_id = ?", (problem, model.model_id))

        await self.do(stop)


def _model(row: sqlite3.Row) -> OnlineModel:
    return OnlineModel(**{**dict(row), "lora": json.loads(row["lora"])})
