"""Sessions: opened by a client, kept alive by its heartbeats, and over once finished or silent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from time import time
from typing import Any
from uuid import uuid4

from gateway.http.tinker.futures import KEPT_SECONDS, Futures
from gateway.http.tinker.store import Session, Store
from paceline import errors
from paceline.log import get_logger

_SILENT_SECONDS = 900.0
"""How long a session may be silent before its work is cancelled; heartbeats come every 10 s."""
_SWEEP_SECONDS = 30.0
_FORGET_SECONDS = 600.0
_log = get_logger(__name__)
_ID = re.compile(r"[0-9a-f-]{36}")


class SessionOver(errors.RunNotFound):
    """The session was finished or is unknown, so the client must open another."""


class Sessions:
    """Tracks when each session was last active."""

    def __init__(self, store: Store, futures: Futures) -> None:
        self._store = store
        self._futures = futures
        self._seen: dict[str, float] = {}
        self._over: set[str] = set()
        """Silent sessions whose work was cancelled."""
        self._started = time()

    async def open(self, tenant: str, metadata: Mapping[str, Any], display_name: str | None) -> str:
        """Open a session and return its id."""
        now, session_id = time(), str(uuid4())
        session = Session(session_id, tenant, now, now, None, metadata, display_name)
        await self._store.add_session(session)
        self._seen[session_id] = now
        return session_id

    def get(self, tenant: str, session_id: str) -> Session:
        """Return a session of the tenant, over or not. Raises SessionOver if there is none."""
        session = self._store.session(session_id) if _ID.fullmatch(session_id) else None
        if session is None or session.tenant != tenant:
            raise SessionOver("no such session; create a new ServiceClient", field="session_id")
        return session

    def check(self, tenant: str, session_id: str) -> Session:
        """Mark a session as alive and return it. Raises SessionOver."""
        session = self.get(tenant, session_id)
        if session.finished is not None:
            raise SessionOver("the session was finished; create a new ServiceClient", field="session_id")
        self._seen[session_id] = time()
        self._over.discard(session_id)
        return session

    async def finish(self, tenant: str, session_id: str) -> None:
        """Finish a session and cancel its work. Idempotent."""
        self.get(tenant, session_id)
        await self._store.write(
            "UPDATE sessions SET finished = ? WHERE session_id = ? AND finished IS NULL", time(), session_id
        )
        await self._futures.end_session(session_id)

    def is_over(self, session: Session) -> bool:
        """Whether the session was finished or has been silent for too long."""
        seen = self._seen.get(session.session_id, max(session.seen, self._started))
        return session.finished is not None or time() - seen > _SILENT_SECONDS

    async def resume(self) -> None:
        """Watch the sessions whose work an earlier gateway left, since their clients may be gone; end what is over."""
        for session_id in self._futures.sessions():
            session = self._store.session(session_id)
            if session is None or session.finished is not None:
                await self._futures.end_session(session_id)
            else:
                self._seen.setdefault(session_id, self._started)

    async def sweep(self) -> None:
        """Cancel the work of silent sessions and delete old results, in an endless loop."""
        forgotten = time()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self._sweep()
                if time() - forgotten > _FORGET_SECONDS:
                    forgotten = time()
                    await self._store.forget_futures(time() - KEPT_SECONDS)
            except errors.PacelineError as error:
                _log.error("sweeping sessions failed; it is tried again soon", error=str(error))

    async def _sweep(self) -> None:
        for session_id in list(self._seen):
            await self._store.write(
                "UPDATE sessions SET seen = ? WHERE session_id = ?", self._seen[session_id], session_id
            )
            if time() - self._seen[session_id] > _SILENT_SECONDS and session_id not in self._over:
                self._over.add(session_id)
                await self._futures.end_session(session_id)
                _log.info("session silent", session=session_id)
            if time() - self._seen[session_id] > 2 * _SILENT_SECONDS:
                del self._seen[session_id]
                self._over.discard(session_id)
