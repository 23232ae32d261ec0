"""The service's interface to the engine: a separate process, so that its death does not end the service."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter
from types import NoneType
from typing import Self, TypeVar

import msgspec

from paceline import tracing
from paceline.child import Child, reason_of_status
from paceline.errors import EngineUnavailable
from paceline.files.own_directory import OwnDirectory
from paceline.requests.bodies import decoded
from paceline.types import (
    Datum,
    ForwardBackwardSpec,
    ModelInfo,
    OptimizerParams,
    RunParameters,
)
from paceline.types.optimizers import optimizer_name
from trainer_service.engine_link import messages
from trainer_service.engine_link.optimizer_specs import settings_of
from trainer_service.engine_link.options import EngineOptions
from trainer_service.engine_link.protocol import (
    AccumulatedOutput,
    AdapterInfo,
    EngineDiedError,
    LoadedState,
    PublishedAs,
    SteppedOutput,
)
from trainer_service.engine_link.watchdog import DEFAULT_PATIENCE, Patience, RankHeartbeats, Watchdog
from trainer_service.failpoints import Failpoints

R = TypeVar("R")

Captured = Callable[[], None]
"""Called when a command has captured a run's state, so that the next one may change it."""

_log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
"""How long the process may take to end once its pipe is closed."""
_ENGINE = ("-m", "trainer_service.engine", "--fd", "0")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def ignore_capture() -> None:
    """Ignore a capture."""


class EngineProcess:
    """Starts an engine in a child process and mirrors TrainerEngine with coroutines.

    A run's commands are executed in the order of their calls, concurrently with those of other runs. Cancelling a call
    does not stop its execution. When the process dies, its runs are lost: the call that it was certainly executing
    raises EngineDiedError; waiting calls, and later ones until `restart`, raise EngineUnavailable. If the process was
    doing several things at once, such as a pass for several calls or a pass and a save, those calls also raise
    EngineUnavailable, and are executed alone when they are repeated. While the process lives, calls raise the engine's
    own errors. A process that hangs for longer than `patience` allows is killed, which counts as a death.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        on_exit: Callable[[int], None] | None = None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """`on_exit` is called with the exit status if the process dies by itself (negative: the signal)."""
        self._options = options
        self._on_exit = on_exit
        self._patience = patience
        self._connection: EngineConnection | None = None
        self._info: ModelInfo | None = None
        self.base_sha256 = ""
        """Identity of the base weights; set by the caller, who knows their files."""
        self._suspects = CrashSuspects()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        """Process id of the engine. Raises EngineUnavailable if it is not running."""
        return self._running().child.pid

    async def start(self) -> ModelInfo:
        """Start the process and load the model. Raises the error of loading, or EngineUnavailable."""
        connection = self._connection = await EngineConnection.open(
            self._options.ranks, self._on_exit, self._suspects, self._patience
        )
        try:
            self._info = await connection.call(messages.Start(self._options), ModelInfo)
        except BaseException as error:
            died = connection.has_died
            await self.close()
            if died and isinstance(error, EngineUnavailable):
                raise _died_while_loading(await connection.child.wait()) from error
            raise
        return self._info

    async def restart(self) -> ModelInfo:
        """Stop the process, if it is still running, and start a new one, which holds no runs."""
        await self.close()
        self._options = replace(self._options, failpoints=Failpoints(self._options.failpoints).lasting)
        return await self.start()

    async def close(self) -> None:
        """Stop the process immediately; waiting calls raise EngineUnavailable."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def describe(self) -> ModelInfo:
        """Describe the loaded base model."""
        if self._info is None:
            raise EngineUnavailable("the engine has not started.")
        return replace(self._info, weights_sha256=self.base_sha256)

    async def create_run(self, run_id: str, parameters: RunParameters) -> AdapterInfo:
        return await self._running().call(messages.create_run(run_id, parameters), AdapterInfo)

    async def delete_run(self, run_id: str) -> None:
        await self._running().call(messages.DeleteRun(run_id), NoneType)

    async def forward_backward(
        self,
        run_id: str,
        data: Sequence[Datum],
        spec: ForwardBackwardSpec,
    ) -> AccumulatedOutput:
        command = messages.ForwardBackward(run_id, list(data), spec)
        size = sum(datum.model_input.nbytes for datum in data)
        asked, waited = perf_counter(), 0.0

        def started() -> None:
            nonlocal waited
            waited = 1e3 * (perf_counter() - asked)

        output = await self._running().call(command, AccumulatedOutput, size=size, started=started)
        output.waited_milliseconds = waited
        return output

    async def optim_step(self, run_id: str, params: OptimizerParams) -> SteppedOutput:
        command = messages.OptimStep(run_id, optimizer_name(params), settings_of(params))
        return await self._running().call(command, SteppedOutput)

    async def discard_gradient(self, run_id: str) -> int:
        return await self._running().call(messages.DiscardGradient(run_id), int)

    async def save_state(self, run_id: str, directory: Path, captured: Captured = ignore_capture) -> None:
        await self._running().call(messages.SaveState(run_id, str(directory)), NoneType, captured)

    async def save_adapter(
        self, run_id: str, directory: Path, captured: Captured = ignore_capture, published: PublishedAs | None = None
    ) -> None:
        await self._running().call(messages.SaveAdapter(run_id, str(directory), published), NoneType, captured)

    async def load_state(self, run_id: str, directory: Path, *, with_optimizer: bool) -> LoadedState:
        return await self._running().call(messages.LoadState(run_id, str(directory), with_optimizer), LoadedState)

    def _running(self) -> EngineConnection:
        if self._connection is None:
            raise EngineUnavailable("the engine is not running.")
        return self._connection


@dataclass(slots=True, eq=False)
class _PendingCall:
    """An unanswered call."""

    command: messages.Start | messages.AnyCommand
    answer: asyncio.Future[msgspec.Raw]
    captured: Captured
    started: Callable[[], None] | None = None
    """Called when the engine begins to execute it; None once it has."""
    is_captured: bool = False
    """Whether the engine has captured the state and writes it while it executes other commands."""
    began_at: float | None = None
    """When the engine began with it, in seconds of `perf_counter`; None until then."""
    captured_at: float | None = None

    def record(self, sent_at: float, ended_at: float) -> None:
        """Record its parts as spans: waiting for the engine's loop, being executed, and being written to the disk."""
        if self.began_at is None:
            return
        captured_at = ended_at if self.captured_at is None else self.captured_at
        tracing.record("engine wait", sent_at, self.began_at)
        tracing.record("engine execute", self.began_at, captured_at)
        if self.is_captured:
            tracing.record("engine write", captured_at, ended_at)


class EngineConnection:
    """A running engine process and the pipe to it."""

    def __init__(
        self,
        child: Child,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        directory: OwnDirectory,
        on_exit: Callable[[int], None] | None,
        suspects: CrashSuspects,
        patience: Patience,
        *,
        ranks: int,
    ) -> None:
        self.child = child
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
        self._heartbeats = RankHeartbeats(directory.path, ranks)
        self._receiving = asyncio.create_task(self._receive())
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def open(
        cls, ranks: int, on_exit: Callable[[int], None] | None, suspects: CrashSuspects, patience: Patience
    ) -> EngineConnection:
        directory = OwnDirectory(Path(gettempdir()), "paceline-engine")
        try:
            child, reader, writer = await Child.start_linked(
                _engine_program(ranks, directory.path),
                environment=_engine_environment(ranks),
                # The service handles Ctrl-C on a terminal; the launcher would forward it.
                own_session=ranks > 1,
            )
        except BaseException:
            directory.close()
            raise
        return cls(child, reader, writer, directory, on_exit, suspects, patience, ranks=ranks)

    @property
    def has_died(self) -> bool:
        """Whether the process ended, or closed its pipe."""
        return self._dead

    async def call(
        self,
        command: messages.Start | messages.AnyCommand,
        kind: type[R],
        captured: Captured = ignore_capture,
        *,
        size: int = 0,
        started: Callable[[], None] | None = None,
    ) -> R:
        """Have the engine execute a command; one of many bytes (`size`) is encoded beside the event loop.

        `started` is called when the engine begins.
        """
        if self._dead:
            raise _unavailable()
        alone = isinstance(command, messages.Overlapping) and command in self._suspects
        request = messages.Request(next(self._ids), command, alone)
        frame = await decoded(size, messages.frame, request)
        if self._dead:  # it died meanwhile
            raise _unavailable()
        self._writer.write(frame)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        sent = self._waiting[request.id] = _PendingCall(command, answer, captured, started)
        with tracing.span(f"engine {type(command).__name__}"):
            sent_at = perf_counter()
            try:
                reply = await answer
            finally:
                sent.record(sent_at, perf_counter())
            with tracing.span("decode"):
                return await decoded(memoryview(reply).nbytes, messages.decode, reply, kind)

    async def close(self) -> None:
        self._closing = True
        self._writer.close()
        await self._receiving

    async def _receive(self) -> None:
        try:
            while True:
                header = await self._read(messages.LENGTH_BYTES)
                self._handle(messages.decode_report(await self._read(int.from_bytes(header, "little"))))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the pipe was closed, from this side or by the death of the process
        finally:
            await self._end()

    async def _read(self, size: int) -> bytes:
        """Read `size` bytes; each part that arrives shows that the process lives. Raises IncompleteReadError."""
        parts: list[bytes] = []
        while size:
            part = await self._reader.read(size)
            if not part:
                raise asyncio.IncompleteReadError(b"", size)
            self._watchdog.note_data()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _handle(self, report: messages.Report) -> None:
        if isinstance(report, messages.Heartbeat):
            self._watchdog.note_heartbeat(report.progress)
            return
        self._watchdog.note_progress()
        match report:
            case messages.Started():
                self._executing, now = set(report.ids), perf_counter()
                for key in report.ids:
                    if (pending := self._waiting.get(key)) is not None and pending.began_at is None:
                        pending.began_at = now
                self._note_started(report.ids)
            case messages.Captured():
                self._capture(report.id)
            case messages.Reply():
                self._answer(report)

    async def _watch(self) -> None:
        reason = await self._watchdog.watch(self._is_busy, self._heartbeats.new)
        _log.error("the engine process hangs; killing it: %s", reason)
        self._kill()

    def _is_busy(self) -> bool:
        """Return whether the engine's loop has work other than loading a model, which may take longer than a pass."""
        return any(not (w.is_captured or isinstance(w.command, messages.Start)) for w in self._waiting.values())

    def _kill(self) -> None:
        """Kill the process and all ranks, including those that are stopped and notice nothing.

        The launcher starts each rank in its own session, so that the ranks are not in the launcher's process group.
        """
        for pid in self._heartbeats.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.child.kill()

    def _note_started(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting.started is not None:
                waiting.started()
                waiting.started = None  # its further passes are reported too

    def _capture(self, request_id: int) -> None:
        self._executing.discard(request_id)
        waiting = self._waiting[request_id]
        waiting.is_captured, waiting.captured_at = True, perf_counter()
        waiting.captured()

    def _answer(self, reply: messages.Reply) -> None:
        self._executing.discard(reply.id)
        waiting = self._waiting.pop(reply.id)
        if isinstance(waiting.command, messages.Overlapping):
            self._suspects.discard(waiting.command)
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
        # Of several commands that it was executing, any may have killed it. None is charged with the death; each is
        # executed alone when it is sent again, so that the next death has one cause.
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
        if not await self.child.ends_within(_EXIT_SECONDS):
            self._kill()
        return await self.child.wait()


def _died() -> EngineDiedError:
    return EngineDiedError(
        "the engine process died while executing this; it is restarting, and the run will be restored."
    )


def _unavailable() -> EngineUnavailable:
    return EngineUnavailable("the engine process died; it is restarting, and its runs will be restored.")


def _died_while_loading(status: int) -> EngineUnavailable:
    reason = reason_of_status(status)
    return EngineUnavailable(f"the engine process died while it loaded the model ({reason}); its log may say why.")


class CrashSuspects:
    """Commands to execute alone until they are answered, so that the engine's next death has one certain cause.

    A command that is sent again after a restart is recognised by its content.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def __contains__(self, command: messages.Overlapping) -> bool:
        return bool(self._digests) and _digest(command) in self._digests

    def add(self, commands: Sequence[messages.Overlapping]) -> None:
        """Suspect commands that shared a pass, or were being written at the time."""
        self._digests.update(map(_digest, commands))

    def discard(self, command: messages.Overlapping) -> None:
        """Stop suspecting a command that was answered."""
        if self._digests:
            self._digests.discard(_digest(command))


def _digest(command: messages.Overlapping) -> bytes:
    if not isinstance(command, messages.ForwardBackward):
        command = msgspec.structs.replace(command, directory="")  # differs each time
    return hashlib.sha256(messages.encode(command)).digest()


def _engine_program(ranks: int, directory: Path) -> tuple[str, ...]:
    """Return the program that Python executes, with the socket to the service as standard input, which ranks inherit.

    The ranks and the launcher rendezvous through files in `directory`: there is no port to choose, and none that others
    could reach. The launcher ends all ranks when one ends. It restarts none, because the service does that.
    """
    if ranks == 1:
        return _ENGINE
    launcher = (
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={directory / 'launcher'}",
        f"--log-dir={directory}",
    )
    return ("-m", "torch.distributed.run", *launcher, *_ENGINE, "--store", str(directory / "ranks"))


def _engine_environment(ranks: int) -> Mapping[str, str]:
    """Return the environment for `_engine_program`. Ranks share the threads that a single process would use."""
    if ranks == 1:
        return os.environ
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return {
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, threads // ranks)),
        # Otherwise the launcher would listen on all interfaces, although no rank connects.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
