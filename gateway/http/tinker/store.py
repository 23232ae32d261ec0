"""The persistent state of the Tinker API: sessions, models, samplers, futures, checkpoint metadata."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import time
from typing import Any

from gateway.http.database import Database
from paceline import errors
from paceline.types import Checkpoint

FORMAT = 1
MOST_SESSIONS = 1_000
"""Sessions of a tenant that are kept; beyond, the oldest that are over are forgotten."""
MOST_SAMPLERS = 10_000
"""Samplers of a session that are kept; beyond, those of the oldest versions are forgotten."""
MOST_RESULT_BYTES = 1 << 30
"""Bytes of a tenant's finished results that are kept, each with its overhead."""
_OVERHEAD = 512

_TABLES = """
CREATE TABLE sessions (session_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL,
    ended REAL, user_metadata TEXT NOT NULL, display_name TEXT);
CREATE INDEX sessions_of_tenant ON sessions (tenant);
CREATE TABLE models (model_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session_id TEXT NOT NULL, run_id TEXT NOT NULL,
    base_model TEXT NOT NULL, first_seq_id INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    lora TEXT NOT NULL, user_metadata TEXT NOT NULL, ended REAL, reloaded INTEGER NOT NULL);
CREATE INDEX models_of_run ON models (run_id);
CREATE INDEX models_of_tenant ON models (tenant);
CREATE INDEX models_of_session ON models (session_id);
CREATE TABLE samplers (sampler_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session_id TEXT NOT NULL,
    base_model TEXT NOT NULL, run_id TEXT NOT NULL, version INTEGER, checkpoint TEXT NOT NULL, model_path TEXT NOT NULL,
    clones INTEGER NOT NULL);
CREATE INDEX samplers_of_session ON samplers (session_id);
CREATE TABLE futures (request_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session_id TEXT NOT NULL, kind TEXT NOT NULL,
    digest BLOB NOT NULL, request BLOB, created REAL NOT NULL, done REAL, media TEXT, result BLOB);
CREATE INDEX futures_done ON futures (done);
CREATE TABLE checkpoints (path TEXT PRIMARY KEY, tenant TEXT NOT NULL, user_metadata TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Session:
    """A session, which a client opens first and keeps alive by heartbeats."""

    session_id: str
    tenant: str
    created: float
    """Seconds since the epoch, for people."""
    seen: float
    """When its client was last heard, by the gateway's steady clock."""
    ended: float | None = None
    """When it was finished, or was found silent, by that clock; None while it is open."""
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    display_name: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A training run of a session."""

    model_id: str
    tenant: str
    session_id: str
    run_id: str
    base_model: str
    """The name that the client gave: the served model's or an alias of it."""
    first_seq_id: int
    """The run's seq_id for the model's command 1."""
    created: float
    used: float
    lora: Mapping[str, Any]
    """rank, train_attn, train_mlp, train_unembed; empty for a run that trains all parameters."""
    user_metadata: Mapping[str, Any]
    ended: float | None = None
    """When the run was deleted, in seconds since the epoch; its checkpoints stay."""
    reloaded: bool = False
    """Whether a checkpoint was loaded into it after its creation: its step alone does not tell what is saved then."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Weights that a session samples from: the base model, a run's version, a run's newest version, or a checkpoint."""

    sampler_id: str
    tenant: str
    session_id: str
    base_model: str
    run_id: str = ""
    version: int | None = None
    checkpoint: str = ""
    model_path: str = ""
    clones: int = 0


@dataclass(frozen=True, slots=True)
class StoredFuture:
    """Posted work; `result` is None until it is done."""

    request_id: str
    tenant: str
    session_id: str
    kind: str
    digest: bytes
    request: bytes | None
    created: float
    done: float | None = None
    media: str | None = None
    result: bytes | None = None


Record = Session | Model | Sampler | StoredFuture


class Store(Database):
    """The database."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises InvalidArgument for another format or an unusable file."""
        super().__init__(path, FORMAT, _TABLES)

    def session(self, session_id: str) -> Session | None:
        """Return a session, or None."""
        row = self.row("SELECT * FROM sessions WHERE session_id = ?", session_id)
        return _session(row) if row else None

    def session_ids(self, tenant: str, limit: int, offset: int) -> list[str]:
        """Return the ids of a page of a tenant's sessions, newest first."""
        sql = "SELECT session_id FROM sessions WHERE tenant = ? ORDER BY rowid DESC LIMIT ? OFFSET ?"
        return [row[0] for row in self.rows(sql, tenant, limit, offset)]

    def open_sessions(self) -> list[tuple[str, float]]:
        """Return the ids of all open sessions, and when the client of each was last heard."""
        return [(row[0], row[1]) for row in self.rows("SELECT session_id, seen FROM sessions WHERE ended IS NULL")]

    def model(self, model_id: str) -> Model | None:
        """Return a model, or None."""
        row = self.row("SELECT * FROM models WHERE model_id = ?", model_id)
        return _model(row) if row else None

    def models(self, tenant: str, session_id: str = "") -> list[Model]:
        """Return a tenant's models, of one session or of all, newest first."""
        sql = "SELECT * FROM models WHERE tenant = ?1 AND (?2 = '' OR session_id = ?2) ORDER BY rowid DESC"
        return [_model(row) for row in self.rows(sql, tenant, session_id)]

    def abandoned(self, tenant: str = "") -> list[Model]:
        """Return the models whose runs exist though their sessions are over, of a tenant or of all, oldest first."""
        sql = (
            "SELECT models.* FROM models LEFT JOIN sessions USING (session_id) WHERE models.ended IS NULL "
            "AND (sessions.session_id IS NULL OR sessions.ended IS NOT NULL) AND (?1 = '' OR models.tenant = ?1) "
            "ORDER BY models.rowid"
        )
        return [_model(row) for row in self.rows(sql, tenant)]

    def model_of_run(self, run_id: str) -> Model | None:
        """Return the model of a run, or None if the run was not created through this API."""
        row = self.row("SELECT * FROM models WHERE run_id = ?", run_id)
        return _model(row) if row else None

    def sampler(self, sampler_id: str) -> Sampler | None:
        """Return a sampler, or None."""
        row = self.row("SELECT * FROM samplers WHERE sampler_id = ?", sampler_id)
        return Sampler(**dict(row)) if row else None

    def samplers(self, session_id: str) -> list[str]:
        """Return the ids of a session's samplers."""
        return [row[0] for row in self.rows("SELECT sampler_id FROM samplers WHERE session_id = ?", session_id)]

    def future(self, request_id: str) -> StoredFuture | None:
        """Return posted work, or None."""
        row = self.row("SELECT * FROM futures WHERE request_id = ?", request_id)
        return StoredFuture(**dict(row)) if row else None

    def unfinished(self) -> list[StoredFuture]:
        """Return posted work without a result, in order of posting."""
        found = self.rows("SELECT * FROM futures WHERE done IS NULL ORDER BY created")
        return [StoredFuture(**dict(row)) for row in found]

    def finished(self, beginning: str) -> list[StoredFuture]:
        """Return finished work whose ids begin with a prefix, in order of completion."""
        sql = "SELECT * FROM futures WHERE request_id >= ? AND request_id < ? AND done IS NOT NULL ORDER BY done"
        return [StoredFuture(**dict(row)) for row in self.rows(sql, beginning, beginning + "\uffff")]

    def checkpoint_metadata(self, tenant: str) -> dict[str, Mapping[str, str]]:
        """Return the metadata that clients attached to checkpoints, by `save_of`."""
        found = self.rows("SELECT path, user_metadata FROM checkpoints WHERE tenant = ?", tenant)
        return {row[0]: json.loads(row[1]) for row in found}

    async def add_session(self, session: Session) -> None:
        """Store a new session in place of the tenant's oldest that is over, if it has too many.

        Raises QuotaExceeded if all of them are open.
        """

        def add(connection: sqlite3.Connection) -> None:
            count = _count(connection, "sessions", session.tenant)
            if count >= MOST_SESSIONS and not _forget_session(connection, session.tenant):
                raise errors.QuotaExceeded(
                    f"{count} sessions of this tenant are open, as many as it may have: finish some",
                    metadata={"quota": "sessions", "used": str(count), "limit": str(MOST_SESSIONS)},
                )
            _insert(connection, "INSERT INTO sessions", session)

        await self.do(add)

    async def heard(self, seen: Mapping[str, float]) -> None:
        """Store when the clients of sessions were last heard."""
        sql = "UPDATE sessions SET seen = ? WHERE session_id = ?"
        rows = [(moment, session_id) for session_id, moment in seen.items()]
        await self.do(lambda connection: connection.executemany(sql, rows))

    async def end_session(self, session_id: str, now: float) -> None:
        """Store that a session is over."""
        sql = "UPDATE sessions SET ended = ? WHERE session_id = ? AND ended IS NULL"
        await self.write(sql, now, session_id)

    async def add_model(self, model: Model) -> int:
        """Store a new model and return how many the tenant has; repeating it has no effect."""

        def add(connection: sqlite3.Connection) -> int:
            _insert(connection, "INSERT OR IGNORE INTO models", model)
            return _count(connection, "models", model.tenant)

        return await self.do(add)

    async def end_model(self, model_id: str) -> None:
        """Record that a model's run was deleted."""
        await self.write("UPDATE models SET ended = ? WHERE model_id = ?", time(), model_id)

    async def reload_model(self, model_id: str) -> None:
        """Record that a checkpoint is loaded into a model."""
        await self.write("UPDATE models SET reloaded = 1 WHERE model_id = ?", model_id)

    async def add_sampler(self, sampler: Sampler) -> None:
        """Store a new sampler, in place of the session's oldest one of a version if it has too many.

        Repeating it has no effect. Raises RequestIdReused if the id is of another sampler, and QuotaExceeded.
        """

        def add(connection: sqlite3.Connection) -> None:
            sql = "SELECT COUNT(*) FROM samplers WHERE session_id = ?"
            ((count,),) = connection.execute(sql, (sampler.session_id,)).fetchall()
            sql = (
                "DELETE FROM samplers WHERE rowid = (SELECT MIN(rowid) FROM samplers "
                "WHERE session_id = ? AND run_id != '')"
            )
            if count >= MOST_SAMPLERS and not connection.execute(sql, (sampler.session_id,)).rowcount:
                raise errors.QuotaExceeded(
                    f"this session has {count} samplers, as many as it may have: create another ServiceClient",
                    metadata={"quota": "samplers", "used": str(count), "limit": str(MOST_SAMPLERS)},
                )
            _insert(connection, "INSERT OR IGNORE INTO samplers", sampler)

        if self.sampler(sampler.sampler_id) is None:
            await self.do(add)
        kept = self.sampler(sampler.sampler_id)
        if kept is None or replace(kept, clones=0) != replace(sampler, clones=0):
            message = f"{sampler.sampler_id[:120]} is another sampler; use the next number"
            raise errors.RequestIdReused(message, field="sampling_session_seq_id")

    async def add_clone(self, sampler_id: str) -> int:
        """Add a clone of a sampler and return its number, from 1."""

        def add(connection: sqlite3.Connection) -> int:
            sql = "UPDATE samplers SET clones = clones + 1 WHERE sampler_id = ? RETURNING clones"
            (row,) = connection.execute(sql, (sampler_id,)).fetchall()
            return int(row[0])

        return await self.do(add)

    async def add_future(self, future: StoredFuture) -> None:
        """Store new work."""
        await self._insert("INSERT INTO futures", future)

    async def settle_future(self, request_id: str, media: str, result: bytes, now: float) -> None:
        """Store a result in place of the request; `now` is a time of the gateway's steady clock."""
        sql = "UPDATE futures SET request = NULL, done = ?, media = ?, result = ? WHERE request_id = ?"
        await self.write(sql, now, media, result, request_id)

    async def trim_results(self, most: int = MOST_RESULT_BYTES) -> None:
        """Delete the oldest results of each tenant that has more than `most` bytes of them."""
        sql = (
            "DELETE FROM futures WHERE rowid IN (SELECT number FROM (SELECT rowid AS number, "
            "SUM(LENGTH(result) + ?) OVER (PARTITION BY tenant ORDER BY done DESC, rowid DESC) AS total "
            "FROM futures WHERE done IS NOT NULL) WHERE total > ?)"
        )
        await self.write(sql, _OVERHEAD, most)

    async def forget_futures(self, before: float) -> None:
        """Delete the results from before a time of the gateway's steady clock."""
        await self.write("DELETE FROM futures WHERE done < ?", before)
        await self.do(lambda connection: connection.execute("PRAGMA incremental_vacuum(16384)").fetchall())

    async def keep_checkpoint_metadata(self, checkpoint: Checkpoint, tenant: str, metadata: Mapping[str, str]) -> int:
        """Store the metadata that a client attached to a checkpoint, and delete that of earlier saves to its path.

        Returns of how many checkpoints the tenant has metadata if they are more than before, otherwise 0.
        """
        key = save_of(checkpoint)

        def keep(connection: sqlite3.Connection) -> int:
            sql = "DELETE FROM checkpoints WHERE path >= ? AND path <= ?"
            earlier = connection.execute(sql, (checkpoint.path, key)).rowcount
            values = (key, tenant, json.dumps(metadata))
            connection.execute("INSERT INTO checkpoints VALUES (?, ?, ?)", values)
            return 0 if earlier else _count(connection, "checkpoints", tenant)

        return await self.do(keep)

    async def forget(self, models: Iterable[str], saves: Iterable[str]) -> None:
        """Delete models by their ids, and the metadata of checkpoints by `save_of`."""

        def forget(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM models WHERE model_id = ?", [(each,) for each in models])
            connection.executemany("DELETE FROM checkpoints WHERE path = ?", [(each,) for each in saves])

        await self.do(forget)

    async def _insert(self, statement: str, record: Record) -> None:
        await self.do(lambda connection: _insert(connection, statement, record))


def _insert(connection: sqlite3.Connection, statement: str, record: Record) -> None:
    """Store a record, whose fields are the columns of its table in their order. Mappings are stored as JSON."""
    values = [getattr(record, column.name) for column in fields(record)]
    values = [json.dumps(value) if isinstance(value, Mapping) else value for value in values]
    connection.execute(f"{statement} VALUES ({', '.join('?' * len(values))})", values)


def _count(connection: sqlite3.Connection, table: str, tenant: str) -> int:
    """Return the number of a tenant's rows in a table."""
    ((count,),) = connection.execute(f"SELECT COUNT(*) FROM {table} WHERE tenant = ?", (tenant,)).fetchall()  # noqa: S608
    return int(count)


def _forget_session(connection: sqlite3.Connection, tenant: str) -> bool:
    """Delete a tenant's oldest session that is over, with its samplers; return whether there was one."""
    sql = "SELECT session_id FROM sessions WHERE tenant = ? AND ended IS NOT NULL ORDER BY rowid LIMIT 1"
    found = connection.execute(sql, (tenant,)).fetchall()
    for (session_id,) in found:
        for table in ("samplers", "sessions"):
            connection.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))  # noqa: S608
    return bool(found)


def save_of(checkpoint: Checkpoint) -> str:
    """Return a checkpoint's path and when it was saved; keys of one path sort by time.

    The path alone does not say what is there: any client may have overwritten the checkpoint.
    """
    return f"{checkpoint.path} {checkpoint.create_time.isoformat(timespec='microseconds')}"


def _session(row: sqlite3.Row) -> Session:
    return Session(**{**dict(row), "user_metadata": json.loads(row["user_metadata"])})


def _model(row: sqlite3.Row) -> Model:
    lora, metadata = json.loads(row["lora"]), json.loads(row["user_metadata"])
    reloaded = bool(row["reloaded"])
    return Model(**{**dict(row), "lora": lora, "user_metadata": metadata, "reloaded": reloaded})
