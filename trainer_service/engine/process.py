"""The engine as the service sees it: a process of its own, so that its death is an error and not the service's end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Self, TypeVar

import msgspec

from paceline.errors import EngineUnavailable
from paceline.types import (
    Datum,
    ForwardBackwardOutput,
    ModelInfo,
    OptimizerParams,
    OptimStepOutput,
    Reduction,
    RunParameters,
)
from trainer_service.engine import wire
from trainer_service.engine.base import AdapterInfo, EngineDiedError, LoadedState, PublishedAs
from trainer_service.engine.launch import engine_command, engine_environment
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.suspects import Suspects
from trainer_service.failpoints import Failpoints

R = TypeVar("R")

Captured = Callable[[], None]
"""Called when a command has taken a run's state, so that the next may change it."""

_log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
"""How long the process may take to end once its pipe is closed."""

_STREAM_LIMIT = 16 * 1024 * 1024
"""Bytes that may wait unread before the pipe is paused."""


def _ignore() -> None:
    pass


class EngineProcess:
    """Starts an engine in a child process and mirrors TrainerEngine with coroutines.

    A run's commands are executed in order of their calls, those of other runs beside them. A call whose waiting is
    cancelled is executed all the same. When the process dies, the call that it was certainly executing raises
    EngineDiedError; calls that wait and later ones raise EngineUnavailable until `restart`, and its runs are gone.
    Where it did several things at the same time, a pass of several calls or a pass and what is saved, these raise
    EngineUnavailable too, and are executed alone when they are made again. Until then errors are the engine's own.
    """

    def __init__(self, options: EngineOptions, *, on_exit: Callable[[int], None] | None = None) -> None:
        """Take `on_exit` to be called with the exit status when the process dies by itself (negative: the signal)."""
        self._options = options
        self._on_exit = on_exit
        self._link: _Link | None = None
        self._info: ModelInfo | None = None
        self._suspects = Suspects()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        """Process id of the engine. Raises EngineUnavailable when there is none."""
        return self._running().process.pid

    async def start(self) -> ModelInfo:
        """Start the process and load the model. Raises what loading raised, or EngineUnavailable."""
        link = self._link = await _Link.open(self._options.ranks, self._on_exit, self._suspects)
        try:
            self._info = await link.call(wire.Start(self._options), ModelInfo)
        except BaseException:
            await self.close()
            raise
        return self._info

    async def restart(self) -> ModelInfo:
        """End the process, if it still runs, and start a fresh one, which holds no runs."""
        await self.close()
        self._options = replace(self._options, failpoints=Failpoints(self._options.failpoints).lasting)
        return await self.start()

    async def close(self) -> None:
        """End the process, at once; waiting calls raise EngineUnavailable."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def describe(self) -> ModelInfo:
        """Say what base model is loaded."""
        if self._info is None:
            raise EngineUnavailable("the engine has not started.")
        return self._info

    async def create_run(self, run_id: str, parameters: RunParameters) -> AdapterInfo:
        return await self._call(wire.create_run(run_id, parameters), AdapterInfo)

    async def delete_run(self, run_id: str) -> None:
        await self._call(wire.DeleteRun(run_id), NoneType)

    async def forward_backward(
        self,
        run_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float],
        *,
        forward_only: bool,
        reduction: Reduction = Reduction.SUM,
        reduction_count: int | None = None,
        refuse_non_finite: bool = False,
    ) -> ForwardBackwardOutput:
        options = (forward_only, reduction, reduction_count, refuse_non_finite)
        command = wire.ForwardBackward(run_id, list(data), loss_fn, dict(loss_fn_config), *options)
        return await self._call(command, ForwardBackwardOutput)

    async def optim_step(self, run_id: str, params: OptimizerParams) -> OptimStepOutput:
        return await self._call(wire.OptimStep.of(run_id, params), OptimStepOutput)

    async def save_state(self, run_id: str, directory: Path, captured: Captured = _ignore) -> None:
        await self._running().call(wire.SaveState(run_id, str(directory)), NoneType, captured)

    async def save_adapter(
        self, run_id: str, directory: Path, captured: Captured = _ignore, published: PublishedAs | None = None
    ) -> None:
        await self._running().call(wire.SaveAdapter(run_id, str(directory), published), NoneType, captured)

    async def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        return await self._call(wire.LoadState(run_id, str(directory), with_optimizer), LoadedState)

    def _running(self) -> _Link:
        if self._link is None:
            raise EngineUnavailable("the engine is not running.")
        return self._link

    async def _call(self, command: wire.AnyCommand, kind: type[R]) -> R:
        return await self._running().call(command, kind)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call without an answer."""

    command: wire.Start | wire.AnyCommand
    answer: asyncio.Future[msgspec.Raw]
    captured: Captured
    is_captured: bool = False
    """Whether the engine writes what it took, while it executes other commands."""


class _Link:
    """A running process and the pipe to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        directory: TemporaryDirectory[str],
        on_exit: Callable[[int], None] | None,
        suspects: Suspects,
    ) -> None:
        self.process = process
        self._directory = directory
        self._reader, self._writer = reader, writer
        self._on_exit = on_exit
        self._suspects = suspects
        self._waiting: dict[int, _Waiting] = {}
        self._executing: set[int] = set()
        """Ids of the requests that the engine said it began and did not answer."""
        self._ids = itertools.count(1)
        self._dead = self._closing = False
        self._receiving = asyncio.create_task(self._receive())

    @classmethod
    async def open(cls, ranks: int, on_exit: Callable[[int], None] | None, suspects: Suspects) -> _Link:
        directory = TemporaryDirectory(prefix="paceline-engine-")
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *engine_command(ranks, Path(directory.name)),
                    stdin=theirs.fileno(),
                    env=engine_environment(ranks),
                    # Ctrl-C on a terminal is the service's to act on; the launcher would pass it on.
                    start_new_session=ranks > 1,
                )
            reader, writer = await asyncio.open_connection(sock=ours, limit=_STREAM_LIMIT)
        except BaseException:
            ours.close()
            directory.cleanup()
            raise
        return cls(process, reader, writer, directory, on_exit, suspects)

    async def call(self, command: wire.Start | wire.AnyCommand, kind: type[R], captured: Captured = _ignore) -> R:
        if self._dead:
            raise _unavailable()
        alone = isinstance(command, wire.Overlapping) and command in self._suspects
        request = wire.Request(next(self._ids), command, alone)
        self._writer.write(wire.frame(wire.encode(request)))
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = _Waiting(command, answer, captured)
        return wire.decode(await answer, kind)

    async def close(self) -> None:
        self._closing = True
        self._writer.close()
        await self._receiving

    async def _receive(self) -> None:
        try:
            while True:
                header = await self._reader.readexactly(wire.LENGTH_BYTES)
                payload = await self._reader.readexactly(int.from_bytes(header, "little"))
                report = wire.decode_report(payload)
                match report:
                    case wire.Began():
                        self._executing = set(report.ids)
                    case wire.Captured():
                        self._capture(report.id)
                    case wire.Reply():
                        self._settle(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The pipe is closed, here or by the death of the process.
        finally:
            await self._end()

    def _capture(self, request_id: int) -> None:
        self._executing.discard(request_id)
        waiting = self._waiting[request_id]
        waiting.is_captured = True
        waiting.captured()

    def _settle(self, reply: wire.Reply) -> None:
        self._executing.discard(reply.id)
        waiting = self._waiting.pop(reply.id)
        if isinstance(waiting.command, wire.Overlapping):
            self._suspects.acquit(waiting.command)
        if waiting.answer.cancelled():
            return
        if reply.failure is None:
            waiting.answer.set_result(reply.result)
        else:
            waiting.answer.set_exception(reply.failure.error())

    async def _end(self) -> None:
        self._dead, by_itself = True, not self._closing
        self._writer.close()
        executing = {
            key: waiting
            for key, waiting in self._waiting.items()
            if by_itself and (key in self._executing or waiting.is_captured)
        }
        if len(executing) > 1:
            commands = (waiting.command for waiting in executing.values())
            self._suspects.add([command for command in commands if isinstance(command, wire.Overlapping)])
        for key, waiting in self._waiting.items():
            if not waiting.answer.done():
                waiting.answer.set_exception(_died() if {key} == executing.keys() else _unavailable())
        self._waiting.clear()
        status = await self._wait_for_exit()
        self._directory.cleanup()
        if by_itself:
            _log.error("the engine process died with status %d", status)
            if self._on_exit is not None:
                self._on_exit(status)

    async def _wait_for_exit(self) -> int:
        # The process ends when its pipe closes. Killing it at once would race with its own end for the exit status.
        for end in (self.process.terminate, self.process.kill):
            with suppress(TimeoutError):
                return await asyncio.wait_for(self.process.wait(), _EXIT_SECONDS)
            end()
        return await self.process.wait()


def _died() -> EngineDiedError:
    return EngineDiedError("the engine process died while it executed this; it starts again, and the run comes back.")


def _unavailable() -> EngineUnavailable:
    return EngineUnavailable("the engine process died; it starts again, and its runs come back.")
