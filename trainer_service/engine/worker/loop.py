"""The engine's side of the pipe: a loop in which each turn executes the waiting commands and one pass."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import sleep
from typing import NoReturn

import msgspec

from trainer_service.engine import messages
from trainer_service.engine.distributed.ranks import OutOfStepError, Ranks
from trainer_service.engine.failures import failure_of
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.protocol import TrainerEngine
from trainer_service.engine.worker.receiver import RequestReceiver
from trainer_service.failpoints import Failpoints

_log = logging.getLogger(__name__)

_NOTHING = msgspec.Raw(messages.encode(None))
_BEAT_SECONDS = 1.0


class Worker:
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
        self._receiver = RequestReceiver(connection, ranks)
        self._held: list[messages.Request] = []
        """Commands held back until their run's job is done."""
        self._jobs: dict[str, messages.Request] = {}
        """Requests of the started jobs, by run."""
        self._unfinished: SimpleQueue[tuple[messages.Request, messages.Unfinished]] = SimpleQueue()
        self._sending = threading.Lock()
        self._failpoints = Failpoints("")
        self._progress = 0
        """Incremented by the loop with everything that it does, so that heartbeats show whether it makes progress."""

    def serve(self) -> NoReturn:
        """Answer commands forever. The process ends when the other end closes, whatever it is doing."""
        self._receiver.start()
        threading.Thread(target=self._finish, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            while True:
                self._turn()
        except (Exception, OutOfStepError):
            # Other ranks died or diverged; this rank's answers may be wrong.
            _log.exception("the engine cannot go on")
            os._exit(1)

    def _turn(self) -> None:
        self._progress += 1
        self._take()
        if self._jobs:
            for job in self._engine.advance(self._announce):
                self._answer(self._jobs.pop(job.run_id), job.output)

    def _take(self) -> None:
        """Execute or start the waiting commands; wait for one if there is nothing else to do."""
        waiting, self._held = self._held, []
        waiting += self._receiver.take(wait=not self._jobs and not waiting)
        busy = set(self._jobs)
        for request in waiting:
            if request.run_id in busy:
                self._held.append(request)
            elif isinstance(request.command, messages.ForwardBackward):
                self._begin(request, request.command)
                busy.update(self._jobs)
            else:
                self._execute(request, request.command)

    def _begin(self, request: messages.Request, command: messages.ForwardBackward) -> None:
        try:
            self._engine.begin(command.run_id, command.data, command.spec, alone=request.alone)
        except Exception as error:
            self._send(messages.Reply(request.id, _NOTHING, failure_of(error, _name(request))))
        else:
            self._jobs[command.run_id] = request

    def _execute(self, request: messages.Request, command: messages.Start | messages.Command) -> None:
        if isinstance(command, messages.READING) and not self._ranks.leads:
            return
        self._progress += 1
        self._send(messages.Began([request.id]))
        self._answer(request, lambda: self._result(command))

    def _announce(self, run_ids: Sequence[str]) -> None:
        self._progress += 1
        self._send(messages.Began([self._jobs[run_id].id for run_id in run_ids]))
        for run_id in run_ids:
            self._failpoints.hit(f"engine_pass_{run_id}")

    def _finish(self) -> NoReturn:
        while True:
            request, rest = self._unfinished.get()
            self._answer(request, rest.finish, "_written")

    def _beat(self) -> NoReturn:
        while True:
            try:
                self._send(messages.Beat(self._progress))
                self._ranks.give_sign()
            except OSError:
                sys.exit()  # Ends this thread. The service is gone; the thread that watches for that ends the process.
            sleep(_BEAT_SECONDS)

    def _result(self, command: messages.Start | messages.Command) -> messages.Result | messages.Unfinished:
        if isinstance(command, messages.Start):
            self._failpoints = Failpoints(command.options.failpoints)
            self._engine = PeftEngine(command.options, self._ranks)
            return self._engine.describe()
        return command.execute(self._engine)

    def _answer(
        self, request: messages.Request, execute: Callable[[], messages.Result | messages.Unfinished], point: str = ""
    ) -> None:
        rest: messages.Unfinished | None = None
        report: messages.Report
        try:
            result = execute()
            if isinstance(result, messages.Unfinished) and request.alone:
                result.finish()
                result = None
            if isinstance(result, messages.Unfinished):
                rest, report = result, messages.Captured(request.id)
            else:
                report = messages.Reply(request.id, msgspec.Raw(messages.encode(result)))
        except Exception as error:
            report = messages.Reply(request.id, _NOTHING, failure_of(error, _name(request)))
        if not isinstance(request.command, messages.READING):
            self._ranks.check_alike(_outcome(report))
        self._failpoints.hit(f"engine_{_name(request)}{point}")
        self._send(report)
        if rest is not None:
            self._unfinished.put((request, rest))

    def _send(self, report: messages.Report) -> None:
        if not self._ranks.leads:
            return
        with self._sending:
            self._connection.sendall(messages.frame(messages.encode(report)))


def _name(request: messages.Request) -> str:
    return type(request.command).__name__


def _outcome(report: messages.Report) -> str:
    return report.failure.reason if isinstance(report, messages.Reply) and report.failure is not None else ""
