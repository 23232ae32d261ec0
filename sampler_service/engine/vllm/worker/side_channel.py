"""A way to vLLM's workers that is open while they compute a step.

vLLM answers calls between two steps, and on a CPU a step takes tens of milliseconds. A worker there computes one layer
after the other in Python and can look aside between two. What it is told this way vLLM's own call tells it as well,
which is answered where no step runs: whichever answer comes first counts.
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
"""Layers follow each other faster than that, and looking aside is a system call."""
_RECEIVED_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of whoever has the other end."""


class Load(NamedTuple):
    """An adapter that a worker is to load."""

    call: int
    """Larger than that of every call before."""
    adapter_id: int
    name: str
    directory: str
    in_memory: bool


class Loaded(NamedTuple):
    """What a worker answers."""

    seconds: float
    in_slot: bool


class MidStepCalls:
    """The service's end: a name in Linux's abstract namespace, which goes with the process."""

    def __init__(self) -> None:
        self.address = f"paceline-{uuid4().hex}"
        self._workers: dict[asyncio.StreamWriter, dict[int, asyncio.Future[Loaded]]] = {}
        """What each worker was asked and has not answered yet."""
        self._serving = Background("worker not listened to")

    async def start(self) -> None:
        """Let workers connect; others are turned away."""
        self._server = await asyncio.start_unix_server(self._connected, path=f"\0{self.address}")

    async def close(self) -> None:
        """Let go of the workers. Answers that are awaited do not come."""
        self._server.close()
        for worker in self._workers:
            worker.close()
        await self._serving.finish()

    async def load(self, load: Load, workers: int) -> Sequence[Loaded]:
        """Return what all workers answer: never, unless as many as `workers` listen."""
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
        """Connect. What `load` returns None for, or raises at, is left to vLLM's call, which raises it to the service.

        Raises OSError when nobody listens at the address, PermissionError when it is another user.
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
        """Do what came since the last look, which may be a moment ago."""
        now = perf_counter()
        if now < self._next_look:
            return
        self._next_look = now + _EVERY_SECONDS
        *lines, self._received = (self._received + self._receive()).split(b"\n")
        for line in lines:
            load = Load(*json.loads(line))
            # One that vLLM's call was first with may be gone by now, and must not come back.
            if load.call > self._last_call:
                self._answer(load)

    def called(self, call: int) -> None:
        """Note a call of vLLM's."""
        self._last_call = max(self._last_call, call)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_RECEIVED_BYTES)
        except OSError:  # nothing came; or the service has gone, and this process goes, too
            return b""

    def _answer(self, load: Load) -> None:
        try:
            loaded = self._load(load)
        except Exception:  # The step's requests have no part in it; vLLM's call raises it where somebody waits.
            return
        if loaded is not None:
            with suppress(OSError):
                self._socket.sendall(_line((load.call, *loaded)))


def _line(values: Sequence[Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _owner(connection: socket.socket) -> int:
    """Return the user that has the other end."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
