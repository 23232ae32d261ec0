"""Sessions: opened by a client, kept open by its heartbeats, and over once finished or silent.

Silence is counted by a clock that nobody can set and that stands still while the gateway is away, so neither a jump of
the machine's clock nor a restart ends a session, and a restart does not revive one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any
from uuid import uuid4

from gateway.http.tinker.futures import KEPT_SECONDS, Futures
from gateway.http.tinker.store import Session, Store
from paceline import errors
from paceline.log import get_logger
from paceline.requests.user_metadata import check_user_metadata
from paceline.steady_clock import SteadyClock

SILENT_SECONDS = 900.0
"""How long a session may be silent before it is over; heartbeats come every 10 s."""
_SWEEP_SECONDS = 30.0
_FORGET_SECONDS = 600.0
_MOST_TAGS = 64
_MOST_NAME = 256
"""Most bytes of a session's display name, and of a tag."""
_log = get_logger(__name__)
_ID = re.compile(r"[0-9a-f-]{36}")


class SessionOver(errors.RunNotFound):
    """The session is over or unknown, so the client must open another."""


class SessionState(Enum):
    """What a session's client may do. A session that is over stays over."""

    OPEN = auto()
    OVER = auto()


class Sessions:
    """Tracks when each open session was last heard, and ends those that are silent."""

    def __init__(self, store: Store, futures: Futures, clock: SteadyClock) -> None:
        self._store = store
        self._futures = futures
        self._clock = clock
        self._seen: dict[str, float] = dict(store.open_sessions())
        """When the client of each open session was last heard."""
        self.on_over: Callable[[], object] = lambda: None
        """Called when a session has ended, and now and then."""

    async def open(
        self, tenant: str, tags: Sequence[str], user_metadata: Mapping[str, Any] | None, display_name: str | None
    ) -> str:
        """Open a session and return its id. Raises OutOfRange, QuotaExceeded; UnicodeEncodeError for half characters.

        What it is described by is kept as long as the session, so it is bounded.
        """
        _check(tags, user_metadata or {}, display_name or "")
        now, session_id = self._clock.now(), str(uuid4())
        metadata = {"tags": list(tags), "user_metadata": user_metadata}
        session = Session(session_id, tenant, self._clock.wall(), now, None, metadata, display_name)
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
        """Note that a session's client was heard, and return the session. Raises SessionOver."""
        session = self.get(tenant, session_id)
        if self.state(session) is SessionState.OVER:
            message = (
                f"the session was finished, or silent for {SILENT_SECONDS / 60:.0f} minutes: create a new "
                "ServiceClient; list_user_checkpoints shows what was saved"
            )
            raise SessionOver(message, field="session_id")
        self._seen[session_id] = self._clock.now()
        return session

    def state(self, session: Session) -> SessionState:
        """Return whether a session is open."""
        return SessionState.OPEN if session.session_id in self._seen else SessionState.OVER

    async def finish(self, tenant: str, session_id: str) -> None:
        """Finish a session and cancel its work. Idempotent."""
        self.get(tenant, session_id)
        await self._end(session_id)

    async def resume(self) -> None:
        """End the work that an earlier gateway left of sessions that are over."""
        for session_id in self._futures.sessions() - self._seen.keys():
            await self._futures.end_session(session_id)

    async def sweep(self) -> None:
        """End silent sessions and delete old results, in an endless loop."""
        forgotten = self._clock.now()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self.end_silent()
                await self._store.trim_results()
                if self._clock.now() - forgotten > _FORGET_SECONDS:
                    forgotten = self._clock.now()
                    await self._store.forget_futures(forgotten - KEPT_SECONDS)
            except errors.PacelineError as error:
                _log.error("sweeping sessions failed; it is tried again soon", error=str(error))

    async def end_silent(self) -> None:
        """End the sessions that are silent, and store when the others were heard."""
        await self._store.heard(self._seen)
        await asyncio.to_thread(self._clock.save)
        for session_id, seen in list(self._seen.items()):
            # A heartbeat may have come since.
            if self._clock.now() - max(seen, self._seen.get(session_id, seen)) > SILENT_SECONDS:
                await self._end(session_id)
                _log.info("session silent", session=session_id)
        self.on_over()

    async def _end(self, session_id: str) -> None:
        """End a session for good: durably first, so that a heartbeat that comes meanwhile finds it open or over."""
        await self._store.end_session(session_id, self._clock.now())
        self._seen.pop(session_id, None)
        await self._futures.end_session(session_id)
        self.on_over()


def _check(tags: Sequence[str], user_metadata: Mapping[str, Any], display_name: str) -> None:
    check_user_metadata(user_metadata)
    if len(tags) > _MOST_TAGS:
        raise errors.OutOfRange(f"has {len(tags)} entries; at most {_MOST_TAGS} are accepted", field="tags")
    for field, texts in (("tags", tags), ("display_name", (display_name,))):
        if any(len(text.encode()) > _MOST_NAME for text in texts):
            raise errors.OutOfRange(f"is longer than {_MOST_NAME} bytes; shorten it", field=field)
    # Half characters, which are refused, may be anywhere in what is now known to be small.
    json.dumps([list(tags), user_metadata, display_name], ensure_ascii=False).encode()
