"""The engine's side of the pipe: a loop in which each turn executes the waiting commands and one pass."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import sleep
from typing import NoReturn

import msgspec

from trainer_service.engine.distributed.ranks import OutOfStepError, Ranks
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link import messages
from trainer_service.engine_link.optimizer_specs import make_params
from trainer_service.engine_link.protocol import StateSave, TrainerEngine
from trainer_service.failpoints import Failpoints

_log = logging.getLogger(__name__)

_NOTHING = msgspec.Raw(messages.encode(None))
_BEAT_SECONDS = 1.0
_IDLE_SECONDS = 60.0
"""Rank 0 shares requests at least this often, even if there are none, so that ranks can tell waiting from hanging."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _DeferredWork:
    """The rest of a command that has captured everything it needs from its run."""

    save: StateSave
    directory: str

    def finish(self) -> None:
        """Write what was captured, in any thread. Raises PacelineError."""
        self.save.write(Path(self.directory))


class EngineWorker:
    """Serves one engine to the process at the other end of `connection`, together with the other ranks.

    A turn receives all waiting commands. It starts a job for each ForwardBackward and executes other commands
    immediately, and ends with one pass over the started jobs. What a turn does depends only on the commands and their
    order. A run's commands are executed in the order of their arrival. A command that saves captures the run's state in
    its turn; a second thread writes the captured states in the same order, and answers.
    """

    _engine: TrainerEngine

    def __init__(self, connection: socket.socket, ranks: Ranks) -> None:
        self._connection = connection
        self._ranks = ranks
        self._payloads: SimpleQueue[bytes] = SimpleQueue()
        """Requests that rank 0 has received through the pipe."""
        self._held: list[messages.Request] = []
        """Commands that wait until their run's job is done."""
        self._jobs: dict[str, messages.Request] = {}
        """Requests of the started jobs, by run."""
        self._deferred: SimpleQueue[tuple[messages.Request, _DeferredWork]] = SimpleQueue()
        self._sending = threading.Lock()
        self._failpoints = Failpoints("")
        self._progress = 0
        """Incremented by the loop with everything that it does, so that heartbeats show whether it makes progress."""

    def serve(self) -> NoReturn:
        """Answer commands forever. The process ends when the other end closes, whatever it is doing."""
        if self._ranks.leads:
            threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._finish_deferred, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            while True:
                self._turn()
        except (Exception, OutOfStepError):
            # Other ranks died or diverged; this rank's answers may be wrong.
            _log.exception("fatal error in the engine loop")
            os._exit(1)

    def _turn(self) -> None:
        """Execute or start the waiting commands, then run a pass; wait for a command if there is nothing else to do."""
        self._progress += 1
        waiting, self._held = self._held, []
        waiting += self._take_requests(wait=not self._jobs and not waiting)
        busy = set(self._jobs)
        for request in waiting:
            command = request.command
            if not isinstance(command, messages.Start) and command.run_id in busy:
                self._held.append(request)
            elif isinstance(command, messages.ForwardBackward):
                self._begin(request, command)
                busy.update(self._jobs)
            else:
                self._execute(request, command)
        if self._jobs:
            for job in self._engine.advance(self._announce):
                self._answer(self._jobs.pop(job.run_id), job.output)

    def _take_requests(self, *, wait: bool) -> list[messages.Request]:
        """Return all waiting requests; with `wait`, at least one. All ranks call this together."""
        while True:
            payloads = self._received(wait=wait) if self._ranks.leads else []
            if self._ranks.size > 1:
                payloads = messages.decode(self._ranks.share(messages.encode(payloads)), list[bytes])
            if payloads or not wait:
                return [messages.decode(payload, messages.Request) for payload in payloads]

    def _received(self, *, wait: bool) -> Sequence[bytes]:
        payloads: list[bytes] = []
        try:
            if wait:
                payloads.append(self._payloads.get(timeout=_IDLE_SECONDS))
            while True:
                payloads.append(self._payloads.get_nowait())
        except Empty:
            return payloads

    def _begin(self, request: messages.Request, command: messages.ForwardBackward) -> None:
        try:
            self._engine.begin(command.run_id, command.data, command.spec, alone=request.alone)
        except Exception as error:
            self._send(messages.Reply(request.id, _NOTHING, messages.failure_of(error, _name(request))))
        else:
            self._jobs[command.run_id] = request

    def _execute(self, request: messages.Request, command: messages.Start | messages.Command) -> None:
        if isinstance(command, messages.READ_ONLY) and not self._ranks.leads:
            return
        self._progress += 1
        self._send(messages.Started([request.id]))
        self._answer(request, lambda: self._result(command))

    def _result(self, command: messages.Start | messages.Command) -> messages.Result | _DeferredWork:
        result: messages.Result | _DeferredWork = None
        match command:
            case messages.Start():
                self._failpoints = Failpoints(command.options.failpoints)
                self._engine = PeftEngine(command.options, self._ranks)
                result = self._engine.describe()
            case messages.CreateRun():
                result = self._engine.create_run(command.run_id, command.lora)
            case messages.CreateFullRun():
                result = self._engine.create_run(command.run_id, command.full)
            case messages.DeleteRun():
                self._engine.delete_run(command.run_id)
            case messages.OptimStep():
                result = self._engine.optim_step(command.run_id, make_params(command.optimizer, command.settings))
            case messages.DiscardGradient():
                result = self._engine.discard_gradient(command.run_id)
            case messages.SaveState():
                result = _DeferredWork(self._engine.capture_state(command.run_id), command.directory)
            case messages.SaveAdapter():
                save = self._engine.capture_adapter(command.run_id, command.published)
                result = _DeferredWork(save, command.directory)
            case messages.LoadState():
                directory = Path(command.directory)
                result = self._engine.load_state(command.run_id, directory, with_optimizer=command.with_optimizer)
        return result

    def _announce(self, run_ids: Sequence[str]) -> None:
        self._progress += 1
        self._send(messages.Started([self._jobs[run_id].id for run_id in run_ids]))
        for run_id in run_ids:
            self._failpoints.hit(f"engine_pass_{run_id}")

    def _answer(
        self, request: messages.Request, execute: Callable[[], messages.Result | _DeferredWork], point: str = ""
    ) -> None:
        rest: _DeferredWork | None = None
        failure: messages.Failure | None = None
        report: messages.Report
        try:
            result = execute()
            # Written now, not beside later commands: if writing kills the process, this command is the cause.
            if isinstance(result, _DeferredWork) and request.alone:
                result.finish()
                result = None
            if isinstance(result, _DeferredWork):
                rest, report = result, messages.Captured(request.id)
            else:
                report = messages.Reply(request.id, msgspec.Raw(messages.encode(result)))
        except Exception as error:
            failure = messages.failure_of(error, _name(request))
            report = messages.Reply(request.id, _NOTHING, failure)
        # Before the answer, which cannot be taken back.
        if self._ranks.size > 1 and not isinstance(request.command, messages.READ_ONLY):
            self._ranks.check_same_outcome(failure.reason if failure is not None else "")
        self._failpoints.hit(f"engine_{_name(request)}{point}")
        self._send(report)
        if rest is not None:
            self._deferred.put((request, rest))

    def _send(self, report: messages.Report) -> None:
        if not self._ranks.leads:
            return
        with self._sending:
            self._connection.sendall(messages.frame(report))

    def _receive(self) -> NoReturn:
        """Receive requests. A thread of its own, so that an orphaned process notices at once and frees its memory."""
        try:
            with self._connection.makefile("rb") as stream:
                while header := stream.read(messages.LENGTH_BYTES):
                    self._payloads.put(stream.read(int.from_bytes(header, "little")))
        except Exception:
            _log.exception("the pipe to the service broke")
            os._exit(1)
        os._exit(0)

    def _finish_deferred(self) -> NoReturn:
        while True:
            request, rest = self._deferred.get()
            self._answer(request, rest.finish, "_written")

    def _beat(self) -> NoReturn:
        while True:
            try:
                self._send(messages.Heartbeat(self._progress))
                self._ranks.beat()
            except OSError:
                sys.exit()  # Ends this thread. The service is gone; the thread that watches for that ends the process.
            sleep(_BEAT_SECONDS)


def _name(request: messages.Request) -> str:
    return type(request.command).__name__


def keep_freed_memory() -> None:
    """Reuse large freed blocks instead of returning them to the system.

    By default every large tensor gets a new mapping, and its pages are faulted in one by one, which takes longer than
    the arithmetic on them. Does nothing if the C library is not glibc.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
