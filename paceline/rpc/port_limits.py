"""What a peer may make a port hold before it has shown a key: connections, calls, headers, pings, and threads.

gRPC's own defences stay on. `overload_protection` counts a call on its connection until its resources are free, so a
peer that starts and resets calls (CVE-2023-44487) is limited to the calls that may be in flight; the next are refused
unread. A client that keeps within `max_concurrent_streams` never meets it.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import BoundedSemaphore, Thread, Timer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from paceline.settings import ServiceSettings

Options = tuple[tuple[str, int], ...]

_HANDSHAKE_MS = 20_000
_MAX_METADATA_BYTES = 16 << 10
_MIN_PENDING = 8_192
"""Sixteen clients may send all the calls that each keeps in flight at the same moment."""
UNREAD_SECONDS = 30
"""How long a call may wait for its handler. Then gRPC drops it: its caller gets CANCELLED, and may send it again."""
_HEALTH_CONNECTIONS, _HEALTH_STREAMS, _HEALTH_IDLE_SECONDS, _HEALTH_MESSAGE_BYTES = 64, 16, 300, 4096
_SCRAPES, SCRAPE_SECONDS = 8, 20.0
"""Most connections to the metrics port at the same time, and how long each may last."""


def service_options(settings: ServiceSettings) -> Options:
    """Return the options of a service's port."""
    return (
        *_limits(
            connections=settings.max_connections,
            streams=settings.max_streams,
            idle_seconds=settings.idle_seconds,
            message_bytes=settings.max_message_bytes,
            pending=max(_MIN_PENDING, 2 * settings.max_streams),
        ),
        ("grpc.max_send_message_length", -1),
        # By default a server closes connections that ping more often than every five minutes; clients ping every 10 s
        # to detect a dead peer.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Pings delayed on a busy machine arrive together, which must not end calls in flight.
        ("grpc.http2.max_ping_strikes", 16),
    )


def health_options() -> Options:
    """Return the options of the health port, which serves probes: few and short calls, and no key."""
    return _limits(
        connections=_HEALTH_CONNECTIONS,
        streams=_HEALTH_STREAMS,
        idle_seconds=_HEALTH_IDLE_SECONDS,
        message_bytes=_HEALTH_MESSAGE_BYTES,
        pending=2 * _HEALTH_CONNECTIONS * _HEALTH_STREAMS,
    )


def _limits(*, connections: int, streams: int, idle_seconds: float, message_bytes: int, pending: int) -> Options:
    """Return what every gRPC port limits. `pending` is the number of calls that may wait for their handlers."""
    return (
        # Calls without a key end when their headers have arrived (AroundInterceptor); a connection that never completes
        # its handshake, or never makes a call, is closed.
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.http.overload_protection", 1),
        # Calls of all connections that arrived faster than the event loop takes them. More are dropped, whosever they
        # are, so one connection must not be able to fill it.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
        ("grpc.server_max_unrequested_time_in_server", UNREAD_SECONDS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.http2.settings_timeout", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", int(1e3 * idle_seconds)),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_receive_message_length", message_bytes),
        # Detect within a minute, from a stream's silence alone, that a caller's machine is gone. This frees a sampler's
        # name and the resources of its watch. By default it takes two hours.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # If another process holds the port, fail instead of sharing its traffic.
        ("grpc.so_reuseport", 0),
    )


def serve_metrics(address: str, registry: CollectorRegistry) -> WSGIServer:
    """Serve Prometheus metrics over HTTP, in threads. Raises OSError."""
    server = _MetricsServer(address)
    server.set_app(make_wsgi_app(registry))
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


class _MetricsHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing: a scrape comes every few seconds."""


class _MetricsServer(WSGIServer):
    """A thread per connection, of which few may be open, each for a limited time, however slowly its peer goes on.

    Further connections are closed on arrival.
    """

    request_queue_size = 128
    """Connections that the kernel keeps until they are taken. Of five, the default, others would try again in 1 s."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._places = BoundedSemaphore(_SCRAPES)
        self.address_family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        super().__init__((host.strip("[]"), int(port)), _MetricsHandler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        Thread(target=self._answer, args=(request, client_address), name="metrics", daemon=True).start()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        cut_off = Timer(SCRAPE_SECONDS, _cut_off, (request,))
        cut_off.daemon = True
        cut_off.start()
        try:
            with suppress(OSError):  # the peer disconnected, or was cut off
                self.finish_request(request, client_address)
        finally:
            cut_off.cancel()
            self.shutdown_request(request)
            self._places.release()


def _cut_off(connection: socket.socket) -> None:
    with suppress(OSError):  # it ended by itself
        connection.shutdown(socket.SHUT_RDWR)
