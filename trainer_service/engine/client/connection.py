"""A running engine process and the pipe to it: requests out, reports in, and how its death affects each call."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import TypeVar

import msgspec

from paceline.errors import EngineUnavailable
from paceline.own_directory import OwnDirectory
from trainer_service.engine import messages
from trainer_service.engine.client.crash_suspects import CrashSuspects
from trainer_service.engine.client.launch import engine_command, engine_environment
from trainer_service.engine.protocol import EngineDiedError
from trainer_service.engine.watchdog import Patience, RankSigns, Watchdog

R = TypeVar("R")

Captured = Callable[[], None]
"""Called when a command has captured a run's state, so that the next one may change it."""

_log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
"""How long the process may take to end once its pipe is closed."""

_STREAM_LIMIT = 16 * 1024 * 1024
"""Bytes that may be buffered unread before the pipe is paused."""


def ignore() -> None:
    """Ignore a capture."""


@dataclass(slots=True, eq=False)
class _PendingCall:
    """An unanswered call."""

    command: messages.Start | messages.AnyCommand
    answer: asyncio.Future[msgspec.Raw]
    captured: Captured
    is_captured: bool = False
    """Whether the engine has captured the state and writes it while it executes other commands."""


class EngineConnection:
    """A running engine process and the pipe to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        directory: OwnDirectory,
        on_exit: Callable[[int], None] | None,
        suspects: CrashSuspects,
        patience: Patience,
        *,
        ranks: int,
    ) -> None:
        self.process = process
        self._leads_group = ranks > 1
        self._directory = directory
        self._reader, self._writer = reader, writer
        self._on_exit = on_exit
        self._suspects = suspects
        self._waiting: dict[int, _PendingCall] = {}
        self._executing: set[int] = set()
        """Ids of the requests that the engine reported as started and has not answered."""
        self._ids = itertools.count(1)
        self._dead = self._closing = False
        self._watchdog = Watchdog(patience, ranks)
        self._signs = RankSigns(directory.path, ranks)
        self._receiving = asyncio.create_task(self._receive())
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def open(
        cls, ranks: int, on_exit: Callable[[int], None] | None, suspects: CrashSuspects, patience: Patience
    ) -> EngineConnection:
        directory = OwnDirectory(Path(gettempdir()), "paceline-engine")
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *engine_command(ranks, directory.path),
                    stdin=theirs.fileno(),
                    env=engine_environment(ranks),
                    # The service handles Ctrl-C on a terminal; the launcher would forward it.
                    start_new_session=ranks > 1,
                )
            reader, writer = await asyncio.open_connection(sock=ours, limit=_STREAM_LIMIT)
        except BaseException:
            ours.close()
            directory.close()
            raise
        return cls(process, reader, writer, directory, on_exit, suspects, patience, ranks=ranks)

    async def call(
        self, command: messages.Start | messages.AnyCommand, kind: type[R], captured: Captured = ignore
    ) -> R:
        if self._dead:
            raise _unavailable()
        alone = isinstance(command, messages.Overlapping) and command in self._suspects
        request = messages.Request(next(self._ids), command, alone)
        self._writer.write(messages.frame(messages.encode(request)))
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = _PendingCall(command, answer, captured)
        return messages.decode(await answer, kind)

    async def close(self) -> None:
        self._closing = True
        self._writer.close()
        await self._receiving

    async def _receive(self) -> None:
        try:
            while True:
                header = await self._read(messages.LENGTH_BYTES)
                self._take(messages.decode_report(await self._read(int.from_bytes(header, "little"))))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the pipe was closed, from this side or by the death of the process
        finally:
            await self._end()

    async def _read(self, size: int) -> bytes:
        """Read `size` bytes; each part that arrives is a sign of life. Raises IncompleteReadError."""
        parts: list[bytes] = []
        while size:
            part = await self._reader.read(size)
            if not part:
                raise asyncio.IncompleteReadError(b"", size)
            self._watchdog.heard()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _take(self, report: messages.Report) -> None:
        if isinstance(report, messages.Beat):
            self._watchdog.beat(report.progress)
            return
        self._watchdog.moved()
        match report:
            case messages.Began():
                self._executing = set(report.ids)
            case messages.Captured():
                self._capture(report.id)
            case messages.Reply():
                self._settle(report)

    async def _watch(self) -> None:
        reason = await self._watchdog.watch(self._is_busy, self._signs.new)
        _log.error("the engine process hangs and is killed: %s", reason)
        self._kill()

    def _is_busy(self) -> bool:
        """Return whether the engine's loop has work other than loading a model, which may take longer than a pass."""
        return any(not (w.is_captured or isinstance(w.command, messages.Start)) for w in self._waiting.values())

    def _kill(self) -> None:
        """Kill the process and all ranks, including those that are stopped and notice nothing.

        The launcher starts each rank in its own session, so that the ranks are not in the launcher's process group.
        """
        for pid in self._signs.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            if self._leads_group:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def _capture(self, request_id: int) -> None:
        self._executing.discard(request_id)
        waiting = self._waiting[request_id]
        waiting.is_captured = True
        waiting.captured()

    def _settle(self, reply: messages.Reply) -> None:
        self._executing.discard(reply.id)
        waiting = self._waiting.pop(reply.id)
        if isinstance(waiting.command, messages.Overlapping):
            self._suspects.acquit(waiting.command)
        if waiting.answer.cancelled():
            return
        if reply.failure is None:
            waiting.answer.set_result(reply.result)
        else:
            waiting.answer.set_exception(reply.failure.error())

    async def _end(self) -> None:
        self._dead, by_itself = True, not self._closing
        self._watching.cancel()
        self._writer.close()
        executing = {
            key: waiting
            for key, waiting in self._waiting.items()
            if by_itself and (key in self._executing or waiting.is_captured)
        }
        if len(executing) > 1:
            commands = (waiting.command for waiting in executing.values())
            self._suspects.add([command for command in commands if isinstance(command, messages.Overlapping)])
        for key, waiting in self._waiting.items():
            if not waiting.answer.done():
                waiting.answer.set_exception(_died() if {key} == executing.keys() else _unavailable())
        self._waiting.clear()
        status = await self._wait_for_exit()
        self._directory.close()
        if by_itself:
            _log.error("the engine process died with status %d", status)
            if self._on_exit is not None:
                self._on_exit(status)

    async def _wait_for_exit(self) -> int:
        # The process ends when its pipe closes. Killing it immediately could replace the exit status of its own end.
        with suppress(TimeoutError):
            return await asyncio.wait_for(self.process.wait(), _EXIT_SECONDS)
        self._kill()
        return await self.process.wait()


def _died() -> EngineDiedError:
    return EngineDiedError("the engine process died while it executed this; it starts again, and the run comes back.")


def _unavailable() -> EngineUnavailable:
    return EngineUnavailable("the engine process died; it starts again, and its runs come back.")
