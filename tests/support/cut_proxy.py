"""A TCP proxy that simulates the network between two services and can be cut.

Network namespaces would be more realistic, but they need CAP_NET_ADMIN or user namespaces, which containers mostly
forbid. A proxy works wherever the tests run. While it is cut, it drops every byte in both directions and answers no new
connections, so neither side notices. When it heals, it resets the earlier connections, like a router that has forgotten
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CutProxy:
    """Forwards bytes between connections to `port` and another port of this machine."""

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.swallowed = 0
        """Bytes that arrived while it was cut."""
        self._upstream = upstream
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CutProxy]:
        """Listen until the block ends."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self._reset()
            server.close()

    def cut(self) -> None:
        """Let nothing through until `heal`."""
        self._whole.clear()

    def heal(self) -> None:
        """Reset open connections and let everything through."""
        self._reset()
        self._whole.set()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        with suppress(OSError):
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            self._writers |= {writer, upstream_writer}
            await asyncio.gather(self._pass(reader, upstream_writer), self._pass(upstream_reader, writer))
            self._writers -= {writer, upstream_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self._whole.is_set():
                    writer.write(data)
                    await writer.drain()
                else:
                    self.swallowed += len(data)
        writer.close()
