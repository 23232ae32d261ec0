"""The gateway's HTTP port: one application, served in the gateway's own event loop."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import socket
import ssl
import sys
import termios
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any, cast

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from gateway.admission import Authenticator
from gateway.deployment import Deployment
from gateway.http.apis import HttpApis
from gateway.http.http_metrics import HttpMetrics
from gateway.http.listener import BACKLOG, Listener
from gateway.http.metaclaw.bodies import BATCHES, MAX_BATCH_PARTS
from gateway.http.middleware import AccessMiddleware
from gateway.http.page.files import PAGE_PATHS
from gateway.http.services import Services
from gateway.http.state import StateUnusable
from gateway.http.tinker import downloads
from gateway.http.tinker.app import PREFIX as TINKER
from gateway.settings import GatewaySettings
from paceline import errors
from paceline.log import get_logger
from paceline.requests.bodies import MAX_JSON_PARTS
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.readers import READER_SECONDS

_OPEN = ("/health", "/healthz", "/v1/health", f"{TINKER}/healthz", *PAGE_PATHS)
_EXPOSED = ["Retry-After", *(f"X-Paceline-{name}" for name in ("Model", "Run", "Version", "Checkpoint", "Blake3"))]
"""Headers of responses that web pages may read."""
_BINARY = (f"{TINKER}/forward_backward", f"{TINKER}/telemetry")
"""Paths whose bodies are protobuf, with bounds of its own, or not read."""
_LONG = ("/completions", "/generate", "/train", "/v1/sample", f"{TINKER}/asample")
"""How paths end whose JSON holds texts or tokens."""
_FEW_PARTS = 1 << 15
"""Most parts of any other JSON, enough for the metadata that may be attached to something."""
_IDLE_SECONDS = 75
"""How long a connection may be idle after a response."""
HEAD_SECONDS = 20.0
"""How long a request's head may take to arrive, from the connection or, on a reused one, from its own first byte."""
_MAX_HEAD = 64 << 10
"""Most bytes of a request's head, or of the fields after a chunked body. The parser itself has no limit."""
MAX_PIPELINED = 4
"""Most requests of a connection that wait for the answer before theirs: a request counts from its head on."""
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_ACKNOWLEDGED = slice(120, 128)
"""Place of tcpi_bytes_acked in Linux's struct tcp_info."""
_HTTP2 = b"PRI * HTTP/2.0"
"""How a connection of HTTP/2, such as a gRPC client's, begins."""
_AGAIN_SECONDS = 1.0
"""How long after a failure the state is opened, or the port bound, again."""
_WARNING_SECONDS = 60.0
"""Least time between two warnings of connections: a client that is not answered connects again and again."""
_log = get_logger(__name__)


class HttpEdge:
    """Serves the HTTP APIs, and is out while their state or their port cannot be had. gRPC is not concerned."""

    def __init__(
        self,
        settings: GatewaySettings,
        authenticators: Sequence[Authenticator],
        services: Services,
        deployment: Deployment,
        waiting_bytes: WaitingBytes,
        registry: CollectorRegistry,
    ) -> None:
        """Metrics go to `registry`."""
        self._settings = settings
        self._authenticators = authenticators
        self._services = services
        self._deployment = deployment
        self._waiting_bytes = waiting_bytes
        self._apis: HttpApis | None = None
        share = settings.http_max_requests_per_tenant or max(1, settings.http_max_connections // 2)
        signed = {downloads.PREFIX: lambda token: self._open_apis().identify(token)}
        guarded = AccessMiddleware(
            self._answer,
            authenticators,
            waiting_bytes,
            settings.max_message_bytes,
            _OPEN,
            share,
            signed,
            most_parts,
            HttpMetrics(registry),
        )
        self._outermost = with_origins(guarded, settings.http_origins)
        self._server: EdgeServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._tending: asyncio.Task[None] | None = None
        self._port_trouble = self._state_trouble = ""

    @property
    def trouble(self) -> str:
        """Why requests are refused, or a part of them; empty if they are not."""
        stored = "" if self._apis is None or self._apis.trouble is None else str(self._apis.trouble)
        return self._port_trouble or self._state_trouble or stored

    async def start(self) -> None:
        """Open the state and listen. What cannot be had is tried again and again."""
        await self._tend()
        self._tending = asyncio.create_task(self._tend_always())

    async def stop(self) -> None:
        """Let responses in progress finish, then close."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        if self._server is not None:
            self._server.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._close_apis()

    async def _tend_always(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_SECONDS)
            await self._tend()

    async def _tend(self) -> None:
        """Open what is not open."""
        # A damaged file's successor is found only by opening it.
        if self._apis is not None and self._apis.trouble is not None and self._apis.trouble.is_damage:
            await self._close_apis()
        if self._apis is None:
            self._state_trouble = _changed(self._state_trouble, await _trouble(self._open()))
        if self._serving is None or self._serving.done():
            self._port_trouble = _changed(self._port_trouble, await _trouble(self._listen()))

    async def _open(self) -> None:
        """Open the state and resume the work in it."""
        apis = HttpApis(self._settings, self._authenticators, self._services, self._deployment, self._waiting_bytes)
        try:
            await apis.start()
        except BaseException:
            await apis.stop()
            raise
        self._apis = apis

    async def _close_apis(self) -> None:
        apis, self._apis = self._apis, None
        if apis is not None:
            await apis.stop()

    async def _listen(self) -> None:
        listening = bind(self._settings.http_listen)
        try:
            server = EdgeServer(server_config(self._settings, self._outermost), self._settings.http_max_connections)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            is_up = asyncio.create_task(server.is_up.wait())
            await asyncio.wait({serving, is_up}, return_when=asyncio.FIRST_COMPLETED)
            is_up.cancel()
            if serving.done():
                serving.result()
        except BaseException:
            listening.close()
            raise
        self._server, self._serving = server, serving
        host, port = listening.getsockname()[:2]
        _log.info("listening", http=f"{host}:{port}", tls=self._settings.tls_cert is not None)

    def _open_apis(self) -> HttpApis:
        if self._apis is None:
            raise StateUnusable(f"the HTTP APIs are out, gRPC is not: {self._state_trouble or 'they are being opened'}")
        return self._apis

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Probes have no key, and the sentence names the machine's folders.
        is_known = scope.get("state", {}).get("identity") is not None
        if self._apis is None and not is_known:
            raise StateUnusable("the HTTP APIs are out, gRPC is not; the gateway's log says why")
        await self._open_apis().app(scope, receive, send)


async def _trouble(work: Coroutine[Any, Any, None]) -> str:
    """Return why work failed; empty if it did not."""
    try:
        await work
    except errors.PacelineError as error:
        return str(error)
    except Exception as error:
        _log.debug("HTTP is out", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return ""


def _changed(before: str, now: str) -> str:
    """Return the trouble of now. A new one is logged, and the end of one."""
    if now and now != before:
        _log.error("HTTP is out; it is tried again, and gRPC is served", reason=now)
    elif before and not now:
        _log.info("HTTP is back", reason=before)
    return now


def most_parts(path: str) -> int | None:
    """Return how many parts the JSON of a path may have; None if its bodies are not JSON."""
    if path in _BINARY:
        return None
    if path == BATCHES:
        return MAX_BATCH_PARTS
    return MAX_JSON_PARTS if path.endswith(_LONG) else _FEW_PARTS


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return an application that web pages of these origins may call; preflight requests, which have no key, end here.

    Keys travel in headers that pages set, so no page is allowed to send cookies.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )


def server_config(settings: GatewaySettings, app: ASGIApp) -> uvicorn.Config:
    """Return how uvicorn serves an app on the HTTP port."""
    grpc_port = f"give it the gRPC port, which is at {settings.listen}"
    protocol = partial(
        TimedProtocol,
        on_http2=_Warning("gRPC client at the HTTP port", grpc_port).log,
        reader_seconds=settings.reader_seconds,
    )
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",  # no API has them, and their connections would leave TimedProtocol
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        # For requests that outlive their connections. Connections are refused when they are made, not at their heads.
        limit_concurrency=settings.http_max_connections + 1,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=max(1, int(settings.drain_seconds)),
    )
    if settings.tls_cert is not None and settings.tls_key is not None:
        config.ssl_certfile, config.ssl_keyfile = settings.tls_cert, settings.tls_key
        if settings.tls_client_ca is not None:
            config.ssl_ca_certs, config.ssl_cert_reqs = str(settings.tls_client_ca), ssl.CERT_REQUIRED
    return config


def bind(address: str) -> socket.socket:
    """Return a socket bound to an address of the form host:port. Raises OSError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise errors.InvalidArgument(
            f"{address} cannot be bound: {error.strerror or error}", field="http_listen"
        ) from error


class TimedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits for what a peer can make the gateway hold.

    A request's head has a timeout and a length limit. Few requests may wait for the answer before theirs. A connection
    is cut off if its peer takes nothing of what was written to it for `reader_seconds`.
    """

    _waiting: asyncio.TimerHandle | None = None
    _looking: asyncio.TimerHandle | None = None
    """Set while the connection is open."""
    _acknowledged: int | None = None
    """Bytes that the peer had acknowledged at the last look; None if it had nothing left to take."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered; uvicorn knows only the newest, which may wait for it."""
    _is_new = True
    _held = 0
    """Bytes received since the parser last passed on a whole head or a part of a body: it holds them."""

    def __init__(
        self,
        *arguments: Any,
        on_http2: Callable[[str], object] = lambda peer: None,
        reader_seconds: float = READER_SECONDS,
        **options: Any,
    ) -> None:
        """`on_http2` is called with the peer's address if the connection begins as HTTP/2."""
        super().__init__(*arguments, **options)
        self._on_http2 = on_http2
        self._reader_seconds = reader_seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Pause whenever the peer leaves anything unread. A limit of 0 would pause a TLS transport that holds nothing.
        transport.set_write_buffer_limits(high=1, low=0)
        self._wait_for_head()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        if self._looking is not None:
            self._looking.cancel()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()
        is_new, self._is_new = self._is_new, False
        if is_new and data.startswith(_HTTP2):
            self._on_http2(_address(self.transport))
            self.send_400_response("This port serves HTTP/1.1; gRPC has a port of its own.")
            return
        self._held += len(data)
        super().data_received(data)
        if self._held > _MAX_HEAD and not self.transport.is_closing():
            if self._waiting is not None:
                self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._held = 0
        self._head_arrived()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
            # An exception is the only way to stop the parser, which may have more heads of the same read before it.
            raise _TooManyWaiting
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_arrived(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self._reader_seconds, self._look)

    def _look(self) -> None:
        """Cut the connection off if the peer took nothing since the last look, though there was something to take.

        The transport does not tell: behind it are the kernel's buffer and, over TLS, another one, which takes an answer
        of any length. A transport that is closing has the end of the connection left, which a peer may never answer.
        """
        unread, acknowledged = _sent(self.transport)
        is_waiting = unread > 0 or self.transport.is_closing()
        if is_waiting and acknowledged == self._acknowledged:
            _log.info("cut off: nothing was read", peer=_address(self.transport), seconds=self._reader_seconds)
            # A transport that is only closed waits until its peer has read what is left.
            self.transport.abort()
            return
        self._acknowledged = acknowledged if is_waiting else None
        self._look_later()


def _sent(transport: asyncio.Transport) -> tuple[int, int]:
    """Return how many bytes in the kernel have not arrived at the peer, and how many have.

    A peer takes no more once its own buffers are full. Not TCP: 0 and 0.
    """
    # uvloop's sockets have no getsockopt.
    with suppress(OSError), socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.stop)
        unread = fcntl.ioctl(own, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(unread, sys.byteorder), int.from_bytes(info[_ACKNOWLEDGED], sys.byteorder)
    return 0, 0


class _TooManyWaiting(Exception):
    """A peer sent more requests than may wait."""


def _address(transport: asyncio.Transport) -> str:
    peer = get_remote_addr(transport)
    return peer[0] if peer else ""


class _Warning:
    """A warning of connections, with what to do about them."""

    def __init__(self, event: str, remedy: str) -> None:
        self._event = event
        self._remedy = remedy
        self._logged = -math.inf

    def log(self, peer: str) -> None:
        """Log it, unless the last one was recent."""
        if monotonic() - self._logged >= _WARNING_SECONDS:
            self._logged = monotonic()
            _log.warning(self._event, peer=peer, remedy=self._remedy)


class EdgeServer(uvicorn.Server):
    """Leaves signals to the gateway and reports when it serves."""

    def __init__(self, config: uvicorn.Config, max_connections: float = math.inf) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._max_connections = max_connections
        self._listeners: list[Listener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn would if it counted connections from their arrival on."""
        config, state, loop = self.config, self.server_state, asyncio.get_running_loop()
        remedy = "http_max_connections are open; close some, or set it higher"

        def protocol() -> asyncio.Protocol:
            arguments: Any = {"config": config, "server_state": state, "app_state": self.lifespan.state, "_loop": loop}
            return config.http_protocol_class(**arguments)

        self._listeners = [
            Listener(
                listening,
                protocol,
                state.connections,
                max_connections=self._max_connections,
                tls=config.ssl,
                on_refused=_Warning("connection refused", remedy).log,
            )
            for listening in sockets or ()
        ]
        self.servers = []
        self.started = True
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, then let responses in progress finish."""
        for listener in self._listeners:
            await listener.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
