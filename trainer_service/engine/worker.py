"""The engine's side of the pipe: a loop of turns, each of them the commands that wait and one pass."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NoReturn

import msgspec

from paceline.errors import Internal, PacelineError
from trainer_service.engine import wire
from trainer_service.engine.base import TrainerEngine
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.failpoints import Failpoints

_log = logging.getLogger(__name__)

_NOTHING = msgspec.Raw(wire.encode(None))


class Worker:
    """Serves one engine to the process at the other end of `connection`.

    A turn takes every command that waits. Those that are no ForwardBackward are executed at once; a ForwardBackward is
    begun, and the turn ends with one pass over all that were. What a turn does depends on the commands and their order
    alone. Commands of a run are executed in the order in which they came.
    """

    _engine: TrainerEngine

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._requests: SimpleQueue[wire.Request] = SimpleQueue()
        self._held: list[wire.Request] = []
        """Commands of runs that have a job."""
        self._jobs: dict[str, wire.Request] = {}
        """Requests of the jobs that were begun, by run."""
        self._failpoints = Failpoints("")

    def serve(self) -> NoReturn:
        """Answer commands for ever. The process ends, whatever it is doing, when the other end closes."""
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            self._take()
            if self._jobs:
                for job in self._engine.advance(self._announce):
                    self._answer(self._jobs.pop(job.run_id), job.output)

    def _receive(self) -> None:
        # Waiting here, beside the engine, an orphan notices at once and frees its memory.
        try:
            with self._connection.makefile("rb") as stream:
                while header := stream.read(wire.LENGTH_BYTES):
                    payload = stream.read(int.from_bytes(header, "little"))
                    self._requests.put(wire.decode(payload, wire.Request))
        except Exception:
            _log.exception("the pipe to the service broke")
            os._exit(1)
        os._exit(0)

    def _take(self) -> None:
        """Execute or begin the commands that wait; wait for one if there is nothing else to do."""
        waiting, self._held = self._held, []
        if not self._jobs and not waiting:
            waiting.append(self._requests.get())
        while True:
            try:
                waiting.append(self._requests.get_nowait())
            except Empty:
                break
        busy = set(self._jobs)
        for request in waiting:
            if request.run_id in busy:
                self._held.append(request)
            elif isinstance(request.command, wire.ForwardBackward):
                self._begin(request, request.command)
                busy.update(self._jobs)
            else:
                self._execute(request, request.command)

    def _begin(self, request: wire.Request, command: wire.ForwardBackward) -> None:
        try:
            command.begin(self._engine, alone=request.alone)
        except Exception as error:
            self._send(wire.Reply(request.id, _NOTHING, _failure(request, error)))
        else:
            self._jobs[command.run_id] = request

    def _execute(self, request: wire.Request, command: wire.Start | wire.Command) -> None:
        self._send(wire.Began([request.id]))
        self._answer(request, lambda: self._result(command))

    def _announce(self, run_ids: Sequence[str]) -> None:
        self._send(wire.Began([self._jobs[run_id].id for run_id in run_ids]))
        for run_id in run_ids:
            self._failpoints.hit(f"engine_pass_{run_id}")

    def _result(self, command: wire.Start | wire.Command) -> wire.Result:
        if isinstance(command, wire.Start):
            self._failpoints = Failpoints(command.options.failpoints)
            self._engine = PeftEngine(command.options)
            return self._engine.describe()
        return command.execute(self._engine)

    def _answer(self, request: wire.Request, result: Callable[[], wire.Result]) -> None:
        try:
            reply = wire.Reply(request.id, msgspec.Raw(wire.encode(result())))
        except Exception as error:
            reply = wire.Reply(request.id, _NOTHING, _failure(request, error))
        self._failpoints.hit(f"engine_{type(request.command).__name__}")
        self._send(reply)

    def _send(self, report: wire.Report) -> None:
        self._connection.sendall(wire.frame(wire.encode(report)))


def _failure(request: wire.Request, error: Exception) -> wire.Failure:
    """Describe an error; one that is not of the catalog stays in the log."""
    if isinstance(error, PacelineError):
        return wire.Failure.of(error)
    error_id = uuid.uuid4().hex
    _log.error("%s failed, error_id=%s", type(request.command).__name__, error_id, exc_info=error)
    return wire.Failure.of(Internal("the engine failed; its log has the error_id.", metadata={"error_id": error_id}))
