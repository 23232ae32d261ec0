"""In front of every HTTP API: authentication, body limits, access log; and callers that disconnect."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from gateway.admission import Authenticator, bearer_token, while_admitted
from gateway.http.http_metrics import HttpMetrics, route_of
from gateway.http.problems import last_event, problem
from gateway.http.streaming import EVENTS
from paceline import errors, tracing
from paceline.log import get_logger
from paceline.requests.bodies import MAX_JSON_PARTS, JsonParts
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import REQUEST_ID_KEY, Identity
from paceline.rpc.interceptors import request_id_of

_BODY_SECONDS = 60.0
"""How long a body may take to arrive."""
_READING = ("GET", "HEAD")
_MAX_LENGTH_DIGITS = 20
"""Most digits of a body's length: those of the largest that HTTP parsers take."""
_TINKER_PREFIX = "tml-"
"""Prefix that Tinker's SDK requires of API keys."""
_MAX_PATH = 96
"""Most characters of a path that are logged."""
_log = get_logger(__name__)
T = TypeVar("T")


class AccessMiddleware:
    """ASGI middleware that checks API keys and body sizes. `scope["state"]["identity"]` holds the caller's identity.

    An answer in progress ends when its caller's key is removed or expires.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticators: Sequence[Authenticator],
        waiting_bytes: WaitingBytes,
        max_body_bytes: int,
        open_paths: Sequence[str],
        max_requests_per_tenant: float = math.inf,
        signed: Mapping[str, Callable[[str], Identity]] = MappingProxyType({}),
        most_parts: Callable[[str], int | None] = lambda path: MAX_JSON_PARTS,
        metrics: HttpMetrics | None = None,
    ) -> None:
        """`open_paths` need no key to be read. Paths below a key of `signed` are credentials: its function reads them.

        It returns the caller, or raises the refusal. `most_parts` returns how many parts the JSON of a path may have;
        None if its bodies are not JSON. Requests are counted in `metrics`.
        """
        self._app = app
        self._authenticators = authenticators
        self._waiting_bytes = waiting_bytes
        self._max_body_bytes = max_body_bytes
        self._max_requests_per_tenant = max_requests_per_tenant
        self._requests: Counter[str] = Counter()
        """Unanswered requests by tenant."""
        self._open = frozenset(open_paths)
        self._signed = signed
        self._most_parts = most_parts
        self._metrics = metrics or HttpMetrics(CollectorRegistry())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        start, answer = perf_counter(), _Answer(send)
        with (
            tracing.continued(headers.get(tracing.TRACEPARENT_KEY, "")),
            tracing.span("HTTP request") as span,
            bound_contextvars(request_id=request_id_of(headers.get(REQUEST_ID_KEY, ""))),
        ):
            tenant, most = "", self._most_parts(scope["path"])
            parts = None if most is None else JsonParts(most)
            body = _BodyReceiver(receive, self._waiting_bytes, self._max_body_bytes, parts)
            self._metrics.in_flight.inc()
            try:
                identity = scope.setdefault("state", {})["identity"] = self._admit(
                    scope["method"], scope["path"], headers
                )
                tenant = identity.tenant if identity else ""
                with self._unanswered(tenant), body.counted(tenant):
                    # Work whose answer has not begun goes on: it may have changed something, and does not last.
                    async with while_admitted(lambda: not answer.is_in_progress or self._still_admits(identity)):
                        await self._app(scope, body, answer)
            except errors.PacelineError as error:
                await answer.fail(error, scope, receive)
            except Exception:
                if answer.status:  # already answered and logged by the application
                    return
                unforeseen = errors.Internal.unforeseen()
                _log.exception("uncaught", path=scope["path"][:_MAX_PATH], error_id=unforeseen.error_id)
                await answer.fail(unforeseen, scope, receive)
            finally:
                seconds = perf_counter() - start
                self._metrics.in_flight.dec()
                span.rename(f"HTTP {route_of(scope)[1]}")
                span.set(code=answer.status)
                self._metrics.ended(scope, answer.status, seconds, body.received, answer.sent)
                log = _log.info if answer.status < HTTPStatus.BAD_REQUEST or answer.status == 408 else _log.warning
                log(
                    "http",
                    method=scope["method"],
                    path=scope["path"][:_MAX_PATH],
                    status=answer.status,
                    tenant=tenant,
                    ms=round(1e3 * seconds, 2),
                )

    @contextmanager
    def _unanswered(self, tenant: str) -> Iterator[None]:
        """Count a request as its tenant's while the block runs. Raises Overloaded if the tenant has too many.

        Requests without a tenant have no limit of their own: health probes are among them.
        """
        if tenant and self._requests[tenant] >= self._max_requests_per_tenant:
            raise errors.Overloaded(
                f"{self._requests[tenant]} requests of this tenant are unanswered, as many as it may have: "
                "wait for answers, or have the operator raise http_max_requests_per_tenant"
            )
        self._requests[tenant] += 1
        try:
            yield
        finally:
            self._requests[tenant] -= 1
            if not self._requests[tenant]:
                del self._requests[tenant]

    def _admit(self, method: str, path: str, headers: dict[str, str]) -> Identity | None:
        """Return the caller; None for an unknown one on an open path.

        Raises InvalidApiKey, MessageTooLarge, InvalidArgument, and what `signed` raises.
        """
        length = headers.get("content-length", "0")
        if len(length) > _MAX_LENGTH_DIGITS:  # Python converts no more than 4300
            raise errors.InvalidArgument(
                f"has {len(length)} digits; send the body's number of bytes", field="content-length"
            )
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)
        for prefix, identify in self._signed.items():
            if path.startswith(prefix):
                return identify(path)
        token = headers.get("x-api-key", "") or bearer_token(headers.get("authorization", ""))
        token = token.removeprefix(_TINKER_PREFIX)
        for authenticator in self._authenticators:
            if identity := authenticator.identify(token):
                return identity
        if method in _READING and path in self._open and not token:
            return None
        problem = "is not known" if token else "is missing"
        raise errors.InvalidApiKey(f"the API key {problem}; send `Authorization: Bearer <key>` or `X-API-Key: <key>`")

    def _still_admits(self, identity: Identity | None) -> bool:
        """Return whether a request that was admitted would be admitted now."""
        return identity is None or any(one.still_admits(identity) for one in self._authenticators)


def identity_of(request: Request) -> Identity:
    """Return the caller of a request."""
    identity: Identity = request.state.identity
    return identity


def tenant_of(request: Request) -> str:
    """Return the tenant of a request."""
    return identity_of(request).tenant


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise Cancelled if the caller disconnects.

    The request's body must have been read.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, disconnecting = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise errors.Cancelled("the caller disconnected")
    finally:
        working.cancel()
        disconnecting.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


class _BodyReceiver:
    """Receives a request's body: enforces its size and deadline, and counts its bytes as its tenant's.

    The parts of JSON are counted as they arrive, before anything parses them.
    """

    def __init__(self, receive: Receive, waiting_bytes: WaitingBytes, max_bytes: int, parts: JsonParts | None) -> None:
        self._receive = receive
        self._tenant = ""
        self._waiting_bytes = waiting_bytes
        self._max_bytes = max_bytes
        self._parts = parts
        self.received = 0
        """Bytes so far."""
        self._is_whole = False
        self._deadline = asyncio.get_running_loop().time() + _BODY_SECONDS

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """Count the bytes as a tenant's until the block ends."""
        self._tenant = tenant
        try:
            yield
        finally:
            self._waiting_bytes.remove(tenant, self.received)

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            raise errors.TimedOut(f"the body did not arrive within {_BODY_SECONDS:g} s") from error
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            if self.received + size > self._max_bytes:
                raise _too_large(self._max_bytes)
            self._waiting_bytes.check(self._tenant, size)
            self._waiting_bytes.add(self._tenant, size)
            self.received += size
            if self._parts is not None:
                self._parts.add(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
        return message


class _Answer:
    """Sends a response and records its status and size."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.sent = 0
        """Bytes of the body so far."""
        self.is_in_progress = False
        """Whether the response has begun and not ended."""
        self._has_events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])  # an HTTPStatus from FastAPI, which a log would show as such
            self._has_events = any(
                name.lower() == b"content-type" and value.startswith(EVENTS.encode())
                for name, value in message.get("headers", ())
            )
            self.is_in_progress = True
        elif message["type"] == "http.response.body":
            self.is_in_progress = message.get("more_body", False)
        await self._send(message)
        self.sent += len(message.get("body", b""))

    async def fail(self, error: errors.PacelineError, scope: Scope, receive: Receive) -> None:
        """Send an error: as the response, or as a stream's last event. Another response that has begun is cut off."""
        with suppress(OSError):
            if not self.status:
                await problem(error, scope["path"])(scope, receive, self)
            elif self.is_in_progress and self._has_events:
                await self({"type": "http.response.body", "body": last_event(error, scope["path"])})


def _too_large(limit: int) -> errors.PacelineError:
    return errors.MessageTooLarge(f"the body is above {limit} bytes; send less at a time")
