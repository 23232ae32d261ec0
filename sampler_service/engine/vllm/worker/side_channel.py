"""A channel to vLLM's workers that they poll while they compute a step.

vLLM answers RPCs only between two steps, and on a CPU a step takes tens of milliseconds. A CPU worker computes layer by
layer in Python and can poll between two layers. Each request is also sent by vLLM's RPC, which is answered if no step
is running; the first answer counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple
from uuid import uuid4

from paceline.background import Background

_EVERY_SECONDS = 1e-3
"""Minimum time between two polls: layers are shorter than this, and a poll is a system call."""
_RECEIVED_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group ids of the peer."""


class Load(NamedTuple):
    """Request to a worker to load an adapter."""

    call: int
    """Number of the call, larger than every previous one."""
    adapter_id: int
    name: str
    directory: str
    in_memory: bool


class Loaded(NamedTuple):
    """A worker's answer."""

    seconds: float
    in_slot: bool


class MidStepCalls:
    """The service's end: a socket in Linux's abstract namespace, which vanishes with the process."""

    def __init__(self) -> None:
        self.address = f"paceline-{uuid4().hex}"
        self._workers: dict[asyncio.StreamWriter, dict[int, asyncio.Future[Loaded]]] = {}
        """The unanswered calls of each worker."""
        self._serving = Background("worker not listened to")

    async def start(self) -> None:
        """Start to accept workers; connections from other users are refused."""
        self._server = await asyncio.start_unix_server(self._connected, path=f"\0{self.address}")

    async def close(self) -> None:
        """Disconnect the workers. Pending calls are never answered."""
        self._server.close()
        for worker in self._workers:
            worker.close()
        await self._serving.finish()

    async def load(self, load: Load, workers: int) -> Sequence[Loaded]:
        """Return the answers of all workers. Waits for ever unless exactly `workers` workers are connected."""
        loop = asyncio.get_running_loop()
        answers: dict[asyncio.StreamWriter, asyncio.Future[Loaded]] = {
            worker: loop.create_future() for worker in self._workers
        }
        if len(answers) != workers:
            await loop.create_future()
        for worker, answer in answers.items():
            self._workers[worker][load.call] = answer
            worker.write(_line(load))
        try:
            return await asyncio.gather(*answers.values())
        finally:
            for awaited in self._workers.values():
                awaited.pop(load.call, None)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _owner(writer.get_extra_info("socket")) != os.geteuid():
            writer.close()
            return
        self._workers[writer] = {}
        self._serving.spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = self._workers[writer]
        with suppress(ConnectionError):
            while line := await reader.readline():
                call, *loaded = json.loads(line)
                if call in answers and not answers[call].done():
                    answers[call].set_result(Loaded(*loaded))
        del self._workers[writer]
        writer.close()


class MidStepInbox:
    """A worker's end, used in the worker's own thread."""

    def __init__(self, address: str, load: Callable[[Load], Loaded | None]) -> None:
        """Connect to the service. If `load` returns None or raises, vLLM's RPC does the work and reports the error.

        Raises OSError if nobody listens at the address, PermissionError if another user does.
        """
        self._load = load
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"\0{address}")
        if _owner(self._socket) != os.geteuid():
            raise PermissionError(f"another user listens at {address}")
        self._socket.setblocking(False)
        self._received = b""
        self._next_look = 0.0
        self._last_call = 0

    def look(self) -> None:
        """Execute calls that arrived since the last poll; do nothing if that was less than a millisecond ago."""
        now = perf_counter()
        if now < self._next_look:
            return
        self._next_look = now + _EVERY_SECONDS
        *lines, self._received = (self._received + self._receive()).split(b"\n")
        for line in lines:
            load = Load(*json.loads(line))
            # If vLLM's RPC already loaded it, it may have been unloaded since and must not come back.
            if load.call > self._last_call:
                self._answer(load)

    def called(self, call: int) -> None:
        """Record a call that vLLM's RPC executes."""
        self._last_call = max(self._last_call, call)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_RECEIVED_BYTES)
        except OSError:  # nothing arrived, or the service has ended and this process is about to end too
            return b""

    def _answer(self, load: Load) -> None:
        try:
            loaded = self._load(load)
        except Exception:  # must not fail the step's requests; vLLM's RPC raises it again, to the caller
            return
        if loaded is not None:
            with suppress(OSError):
                self._socket.sendall(_line((load.call, *loaded)))


def _line(values: Sequence[Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _owner(connection: socket.socket) -> int:
    """Return the user id of the peer."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
