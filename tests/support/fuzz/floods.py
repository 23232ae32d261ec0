"""A peer that floods a port with calls which it resets at once, and what the server and another client feel of it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.fuzz.raw_http2 import ACK, END_HEADERS, HEADERS, PREFACE, RESET, SETTINGS, frame, header_block

_CALLS_AT_ONCE = 100
_CANCEL = struct.pack(">I", 8)


def resident_bytes(pid: int) -> int:
    """Return a process's memory in RAM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def flood_of_resets(port: int, path: str, count: int) -> None:
    """Start `count` calls on one connection, and reset each at once; return when the server has read them all."""
    block = header_block(path)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
        reading = threading.Thread(target=_discard, args=(connection,))
        reading.start()
        for first in range(1, 2 * count, 2 * _CALLS_AT_ONCE):
            streams = range(first, first + 2 * _CALLS_AT_ONCE, 2)
            connection.sendall(
                b"".join(frame(HEADERS, END_HEADERS, one, block) + frame(RESET, 0, one, _CANCEL) for one in streams)
            )
        connection.shutdown(socket.SHUT_WR)
        reading.join()


def _discard(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass


@dataclass
class Watched:
    """What was measured while a block ran."""

    idle: float
    """Seconds that the slower of two calls in a hundred takes while nothing else happens."""
    waits: list[float] = field(default_factory=list)
    """Seconds that each call of the other client took."""
    grown: int = 0
    """Bytes by which the server's memory had grown at its highest."""

    @property
    def worst(self) -> float:
        """How many times as long as on an idle server the longest call took."""
        return max(self.waits) / self.idle


@contextmanager
def watching(pid: int, call: Callable[[], object]) -> Iterator[Watched]:
    """Make calls one after the other while the block runs, and look at the server's memory after each.

    The last call begins after the block.
    """

    def timed() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    for _ in range(20):
        timed()
    watched = Watched(sorted(timed() for _ in range(100))[98])
    before, over, failures = resident_bytes(pid), threading.Event(), list[BaseException]()

    def watch() -> None:
        is_last = False
        try:
            while not is_last:
                is_last = over.is_set()
                watched.waits.append(timed())
                watched.grown = max(watched.grown, resident_bytes(pid) - before)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield watched
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]
