"""Accepts HTTP connections: each counts from its arrival on, and its TLS handshake has a time limit."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.background import Background
from paceline.log import get_logger

BACKLOG = 4096
"""Most connections that wait in the kernel until they are accepted."""
HANDSHAKE_SECONDS = 20.0
"""How long a TLS handshake may take."""
RETRY_SECONDS = 1.0
"""How long to wait after a connection could not be accepted, such as for lack of file descriptors."""
_log = get_logger(__name__)


class Listener:
    """Accepts the connections of one socket.

    An event loop's own server tells a protocol of its connection only after the TLS handshake, so connections in a
    handshake would not be counted.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        connections: set[Any],
        *,
        max_connections: float,
        tls: ssl.SSLContext | None,
        on_refused: Callable[[str], object],
    ) -> None:
        """Listen. `connections` are the protocols of open connections: each removes itself when its connection is lost.

        If `max_connections` are open, a further one is closed on arrival, and `on_refused` is called with its address.
        """
        self._listening = listening
        self._protocol = protocol
        self._connections = connections
        self._max_connections = max_connections
        self._on_refused = on_refused
        self._options: dict[str, Any] = {}
        if tls is not None:
            # A shutdown takes as long as the peer reads what was written before. Protocols cut off those that do not.
            self._options = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": math.inf}
        self._loop = asyncio.get_running_loop()
        self._connecting = Background("connection failed")
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._listen()

    async def close(self) -> None:
        """Accept no more connections, and end those in a handshake."""
        self._loop.remove_reader(self._listening)
        if self._retry is not None:
            self._retry.cancel()
        await self._connecting.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, peer = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # The connection stays in the backlog, so the loop would call this again at once.
                _log.error("connection not accepted", cause=error.strerror)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(RETRY_SECONDS, self._listen)
                return
            if len(self._connections) >= self._max_connections:
                connection.close()
                self._on_refused(peer[0])
                continue
            connection.setblocking(False)
            made = self._protocol()
            self._connections.add(made)
            self._connecting.spawn(self._connect(connection, made))

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        is_connected = False
        try:
            with suppress(OSError):  # of the peer, such as a handshake that fails or takes too long
                await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._options)
                is_connected = True
        finally:
            if not is_connected:
                self._connections.discard(protocol)
