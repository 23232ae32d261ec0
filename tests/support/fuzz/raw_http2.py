"""A peer that speaks just enough HTTP/2 (RFC 9113) to misbehave: it starts calls and never continues them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header_block(path: str, extra: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """Encode the headers of a call as HPACK literals (RFC 7541)."""
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *extra,
    ]
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in pairs)


def _string(text: bytes) -> bytes:
    length = len(text)
    if length < 127:
        return bytes((length,)) + text
    out, length = bytearray((127,)), length - 127
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    return bytes(out) + bytes((length,)) + text


@dataclass
class Peer:
    """A connection; `run` reads what arrives and keeps track of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    max_streams: int = 0
    """Concurrent streams that the server allows."""
    ended: set[int] = field(default_factory=set)
    """Streams that the server ended."""
    windows: dict[int, int] = field(default_factory=dict)
    """Bytes that the server lets each stream send beyond the first 64 KiB; stream 0 is the connection."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def connect(cls, port: int | str, window: int = 65_535) -> Peer:
        """Connect to a port, or to a socket's path, and send the preface; each stream may send `window` bytes."""
        if isinstance(port, int):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        else:
            reader, writer = await asyncio.open_unix_connection(port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window)))
        return cls(reader, writer)

    def begin(self, stream: int, path: str, extra: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send the headers of a call."""
        self.writer.write(frame(HEADERS, END_HEADERS, stream, header_block(path, extra)))

    async def run(self) -> None:
        """Read until the server closes the connection."""
        try:
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                self.changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.changed.set()

    async def until(self, condition) -> None:
        """Wait until `condition()` is true, checking it after each frame."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                number, value = struct.unpack(">HI", payload[at : at + 6])
                self.max_streams = value if number == 3 else self.max_streams
            self.writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.writer.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW:
            self.windows[stream] = self.windows.get(stream, 0) + struct.unpack(">I", payload)[0]
        elif kind == RESET or (kind == HEADERS and flags & END_STREAM):
            self.ended.add(stream)
