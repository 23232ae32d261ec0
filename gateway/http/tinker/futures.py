"""Posted work and its results, which are kept for fetching across restarts of the gateway.

Work starts at once and in any order, because the trainer orders a run's commands by seq_id. Work that a service cannot
do yet is retried until its session is over; retries are idempotent. Only a command that waits for another one which is
not posted fails in the end: the other one was refused when it was posted, and the client has given up on it.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import Any, Generic, TypeVar

from gateway.http.problems import is_fixable_by_caller
from gateway.http.state import StateUnusable
from gateway.http.tinker.store import Store, StoredFuture
from paceline import errors
from paceline.background import Background
from paceline.client.retry import is_retryable
from paceline.errors import Fate
from paceline.log import get_logger
from paceline.requests.bodies import decoded
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.status import status_message
from paceline.steady_clock import SteadyClock

JSON, PROTOBUF = "application/json", "application/x-protobuf"
KEPT_SECONDS = 3600.0
"""How long a result can be fetched, in seconds of the gateway's steady clock."""
KEPT_IN_MEMORY_SECONDS = 60.0
GAP_SECONDS = 900.0
"""How long a command waits for one before it that is not posted.

The SDK posts a refused command again for 5 minutes, and posts some only when the caller's own loss is computed.
"""
MAX_DELAY = 5.0
_FIRST_DELAY = 0.1
_COPIES = 3
"""Copies of a request in memory while it is in flight: parsed, converted, and being sent."""
_MAX_PRESENT = 1024
"""Most sampler clones whose finished work is tracked; the one tracked longest is evicted."""
_CLONE = 1_000_000_000
"""Clone k of a sampler numbers its samples from k times this."""
_log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of work: a response body and its media type."""

    media: str
    body: bytes

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Result:
        """Return a JSON result."""
        return cls(JSON, json.dumps(content).encode())

    @classmethod
    def of_error(cls, error: errors.PacelineError) -> Result:
        """Return the result for a failure, for which the SDK raises RequestFailedError."""
        category = "user" if is_fixable_by_caller(error) else "server"
        return cls.of({"error": f"{error.reason}: {status_message(error)}", "category": category})


@dataclass(slots=True, eq=False)
class Work:
    """Posted work."""

    request_id: str
    tenant: str
    session_id: str
    kind: str
    digest: bytes
    size: int
    """Bytes that it counts as while it is in flight."""
    queue_state: str = "active"
    queue_state_reason: str = ""
    result: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: asyncio.Task[None] | None = None
    storing: asyncio.Task[None] | None = None
    """Ends when the request is stored; None for work that an earlier gateway stored."""


@dataclass(slots=True)
class Posted(Generic[T]):
    """A request of work in flight. Whoever has it done for good lets it go, since it may be large."""

    request: T
    is_let_go: bool = False
    on_let_go: Callable[[], None] = lambda: None

    def let_go(self) -> None:
        """Keep the request no longer: the work cannot be lost, and is not sent again."""
        del self.request
        self.is_let_go = True
        self.on_let_go()


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of work: how its request is serialized and parsed, and how it is run."""

    name: str
    dump: Callable[[T], bytes]
    load: Callable[[bytes], T]
    run: Callable[[str, Posted[T]], Awaitable[Result]]
    """Called with the tenant and the request."""


def _dumped(kind: Kind[T], request: T) -> tuple[bytes, bytes]:
    """Return a request's bytes and their digest."""
    body = kind.dump(request)
    return body, sha256(kind.name.encode() + body).digest()


@dataclass(slots=True)
class _Completions:
    """The finished work of one sampler clone, in order of completion, as `retrieve_futures` reports it."""

    last: int
    entries: list[tuple[int, str, Result]] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, request_id: str, result: Result) -> None:
        """Record finished work."""
        self.last += 1
        self.entries.append((self.last, request_id, result))
        self.more.set()


class Futures:
    """Runs posted work and keeps its results."""

    def __init__(self, store: Store, waiting_bytes: WaitingBytes, clock: SteadyClock | None = None) -> None:
        """`waiting_bytes` counts each tenant's bytes, including those of unfinished work."""
        self._store = store
        self._clock = clock or SteadyClock()
        self._waiting_bytes = waiting_bytes
        self._kinds: dict[str, Kind[Any]] = {}
        self._works: dict[str, Work] = {}
        """Work in flight or recently finished, by request id."""
        self._completions: dict[tuple[str, str, int], _Completions] = {}
        self._saving = Background("a result was not stored")
        self._closing = asyncio.Event()

    def add(self, kind: Kind[T]) -> Kind[T]:
        """Register a kind of work and return it."""
        self._kinds[kind.name] = kind
        return kind

    async def resume(self) -> None:
        """Restart the work that an earlier gateway did not finish."""
        for stored in self._store.unfinished():
            size = _COPIES * len(stored.request or b"")
            work = Work(stored.request_id, stored.tenant, stored.session_id, stored.kind, stored.digest, size)
            try:
                request = self._kinds[stored.kind].load(stored.request or b"")
            except Exception:  # written in another format by another release
                error = errors.Internal("the request was posted to another release of the gateway; send it again")
                await self._resolve(work, Result.of_error(error))
                continue
            self._begin(work, request)

    async def close(self) -> None:
        """Cancel the work in flight; the next gateway restarts it."""
        tasks = [work.task for work in self._works.values() if work.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._closing.set()
        await self._saving.finish()

    async def post(
        self, kind: Kind[T], request_id: str, tenant: str, session_id: str, request: T, size: int = 0
    ) -> None:
        """Accept work durably; repeating the call has no effect. `size` is about that of the request in bytes.

        The work starts at once. If it cannot be stored it is given up, and the same request may be posted again. Raises
        RequestIdReused if the id names other work, UnreadableMessage if the request cannot be serialized, and
        StateUnusable.
        """
        try:
            body, digest = await decoded(size, _dumped, kind, request)
        except ValueError as error:
            message = "the request has text that is not Unicode, or is nested too deep"
            raise errors.UnreadableMessage(message) from error
        known = self._works.get(request_id) or self._store.future(request_id)
        if known is not None:
            if known.tenant != tenant or known.digest != digest:
                raise errors.RequestIdReused(f"{request_id[:120]} was another request; use the next number")
            if isinstance(known, Work) and known.storing is not None:
                await asyncio.shield(known.storing)
            return
        size = _COPIES * len(body)
        self._waiting_bytes.check(tenant, size)
        work = Work(request_id, tenant, session_id, kind.name, digest, size)
        self._begin(work, request)
        stored = StoredFuture(request_id, tenant, session_id, kind.name, digest, body, self._clock.now())
        work.storing = asyncio.create_task(self._store.add_future(stored))
        work.storing.add_done_callback(
            lambda done: self._give_up(work) if not done.cancelled() and done.exception() else None
        )
        await asyncio.shield(work.storing)

    @contextmanager
    def counted(self, tenant: str, size: int) -> Iterator[None]:
        """Count bytes as the tenant's while a request is read. Raises QuotaExceeded, Overloaded."""
        with self._waiting_bytes.waiting(tenant, size):
            yield

    async def result(self, tenant: str, request_id: str, seconds: float) -> Result | Work:
        """Return a result, or the work if it takes longer than `seconds`. Raises RunNotFound if there is neither."""
        work = self._works.get(request_id)
        if work is not None and work.tenant == tenant:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(work.result), seconds)
            return work
        stored = self._store.future(request_id)
        if stored is None or stored.tenant != tenant or stored.media is None or stored.result is None:
            raise errors.RunNotFound(
                f"no such request, or its result was deleted: {request_id[:99]}", field="request_id"
            )
        return Result(stored.media, stored.result)

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel an unfinished sample that is no longer needed; any other work is left as it is."""
        work = self._works.get(request_id)
        if work is not None and work.tenant == tenant and work.kind == "sample" and not work.result.done():
            await self._end(work)

    def sessions(self) -> set[str]:
        """Return the sessions that have unfinished work."""
        return {work.session_id for work in self._works.values() if not work.result.done()}

    async def end_session(self, session_id: str) -> None:
        """Cancel all work of a session that is over."""
        for work in list(self._works.values()):
            if work.session_id == session_id and not work.result.done():
                await self._end(work)

    async def completions(
        self, tenant: str, sampler_id: str, clone: int, after: int, seconds: float
    ) -> tuple[list[tuple[str, Result]], int]:
        """Return a sampler clone's work finished after a cursor, waiting if there is none, and the next cursor."""
        done = self._done_of(tenant, sampler_id, clone)
        after = after if after <= done.last else 0  # then it is of an earlier gateway
        done.entries = [entry for entry in done.entries if entry[0] > after]
        if not done.entries:
            done.more.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(done.more.wait(), seconds)
        return [(request_id, result) for _, request_id, result in done.entries], max(done.last, after)

    def _done_of(self, tenant: str, sampler_id: str, clone: int) -> _Completions:
        """Return the finished work of a sampler clone; the first call collects all finished so far."""
        key = (tenant, sampler_id, clone)
        if key not in self._completions:
            while len(self._completions) >= _MAX_PRESENT:
                del self._completions[next(iter(self._completions))]
            # Cursors start at the current time, so those of an earlier gateway are lower, or, after a loss, above all.
            done = self._completions[key] = _Completions(int(self._clock.now() * 1e6))
            finished = {
                stored.request_id: Result(stored.media, stored.result or b"")
                for stored in self._store.finished(f"{sampler_id}:")
                if stored.tenant == tenant and stored.media is not None
            }
            # A result is delivered before it is stored, so recent ones may be in memory only.
            finished |= {
                work.request_id: work.result.result()
                for work in self._works.values()
                if work.tenant == tenant and work.kind == "sample" and work.result.done()
            }
            for request_id, result in finished.items():
                if _clone_of(request_id) == (sampler_id, clone):
                    done.add(request_id, result)
        return self._completions[key]

    def _begin(self, work: Work, request: Any) -> None:
        self._works[work.request_id] = work
        self._waiting_bytes.add(work.tenant, work.size)
        posted = Posted(request, on_let_go=lambda: self._uncount(work))
        work.task = asyncio.create_task(self._run(work, posted))

    def _uncount(self, work: Work) -> None:
        """Count the bytes of work no longer."""
        self._waiting_bytes.remove(work.tenant, work.size)
        work.size = 0

    async def _run(self, work: Work, posted: Posted[Any]) -> None:
        kind, failures, gap, since = self._kinds[work.kind], 0, "", 0.0
        while True:
            try:
                result = await kind.run(work.tenant, posted)
                break
            except errors.PacelineError as error:
                if posted.is_let_go or not _may_succeed_later(error):
                    result = Result.of_error(error)
                    break
                if isinstance(error, errors.SeqIdGap):
                    missing = self._missing(work, error)
                    if missing != gap:
                        gap, since = missing, monotonic()
                    if missing and monotonic() - since >= GAP_SECONDS:
                        result = Result.of_error(_never_posted(missing))
                        break
                delay = max(error.retry_after or 0.0, min(MAX_DELAY, _FIRST_DELAY * 2 ** min(failures, 8)))
                is_limit = isinstance(error, errors.QuotaExceeded)
                work.queue_state = "paused_rate_limit" if is_limit else "paused_capacity"
                work.queue_state_reason = status_message(error)
            except (ValueError, OverflowError) as refusal:  # invalid Unicode, a number too large for its field
                result = Result.of_error(errors.InvalidArgument(f"cannot be sent: {str(refusal)[:200]}"))
                break
            except Exception:
                _log.exception("uncaught", kind=work.kind, request=work.request_id)
                result = Result.of_error(errors.Internal("internal error; see the gateway's log"))
                break
            await asyncio.sleep(delay)
            failures += 1
        await self._resolve(work, result)

    def _missing(self, work: Work, error: errors.SeqIdGap) -> str:
        """Return the number of the command that a command waits for; empty if that one is in flight."""
        missing = error.metadata.get("missing", "")
        earlier = self._works.get(f"{work.request_id.rpartition(':')[0]}:{missing}")
        return missing if earlier is None or earlier.result.done() else ""

    def _forget(self, work: Work) -> None:
        if self._works.get(work.request_id) is work:  # otherwise it was given up and posted again
            del self._works[work.request_id]

    def _give_up(self, work: Work) -> None:
        """Forget work that could not be stored."""
        self._forget(work)
        if work.task is not None:
            work.task.cancel()
        if not work.result.done():
            self._uncount(work)
            work.result.set_result(Result.of_error(StateUnusable("the request could not be stored; post it again")))

    async def _end(self, work: Work) -> None:
        if work.task is not None:
            work.task.cancel()
            await asyncio.gather(work.task, return_exceptions=True)
        await self._resolve(work, Result.of_error(errors.Cancelled("the request was cancelled, or its session ended")))

    async def _resolve(self, work: Work, result: Result) -> None:
        """Resolve the result for its waiters, then store it. A gateway that ends in between computes it again."""
        if work.result.done():
            return
        work.result.set_result(result)
        if work.task is not None:
            self._uncount(work)
        # Otherwise no client asks for the completions of the sampler.
        if work.kind == "sample" and (done := self._completions.get((work.tenant, *_clone_of(work.request_id)))):
            done.add(work.request_id, result)
        self._saving.spawn(self._save(work, result))

    async def _save(self, work: Work, result: Result) -> None:
        """Store a result, again and again if the disk is full. It stays in memory until it is stored."""
        is_logged = False
        while True:
            try:
                await self._store.settle_future(work.request_id, result.media, result.body, self._clock.now())
            except (StateUnusable, sqlite3.Error) as error:
                if self._closing.is_set():
                    raise
                if not is_logged:
                    is_logged = True
                    _log.error("a result was not stored; it is tried again", request=work.request_id, error=str(error))
            else:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), MAX_DELAY)
        asyncio.get_running_loop().call_later(KEPT_IN_MEMORY_SECONDS, self._forget, work)


def _may_succeed_later(error: errors.PacelineError) -> bool:
    """Return whether the same work may succeed when it is tried again."""
    if error.fate is Fate.ANSWERED:
        return False
    return is_retryable(error) or error.fate is Fate.UNKNOWN or isinstance(error, errors.TimedOut | errors.SeqIdGap)


def _never_posted(missing: str) -> errors.SeqIdGap:
    message = (
        f"command {missing} of the model was not posted within {GAP_SECONDS / 60:.0f} minutes, so this one was not "
        "executed; load the last checkpoint into a new training client"
    )
    return errors.SeqIdGap(message, field="seq_id")


def _clone_of(request_id: str) -> tuple[str, int]:
    """Return the sampler that a sample belongs to, and the number of its clone."""
    sampler_id, _, number = request_id.rpartition(":")
    return sampler_id, int(number) // _CLONE
