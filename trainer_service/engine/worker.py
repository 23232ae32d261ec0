"""The engine's side of the pipe: executes commands one at a time, in order of arrival."""

from __future__ import annotations

import logging
import os
import socket
from typing import NoReturn

import msgspec

from trainer_service.engine import wire
from trainer_service.engine.base import TrainerEngine
from trainer_service.engine.failures import failure_of
from trainer_service.engine.intake import Intake
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.ranks import Ranks
from trainer_service.failpoints import Failpoints

_log = logging.getLogger(__name__)


class Worker:
    """Serves one engine to the process at the other end of `connection`, together with the other ranks."""

    _engine: TrainerEngine

    def __init__(self, connection: socket.socket, ranks: Ranks) -> None:
        self._connection = connection
        self._ranks = ranks
        self._intake = Intake(connection, ranks)
        self._failpoints = Failpoints("")

    def serve(self) -> NoReturn:
        """Answer commands for ever. The process ends, whatever it is doing, when the other end closes."""
        self._intake.start()
        try:
            while True:
                for request in self._intake.take(wait=True):
                    self._serve(request)
        except Exception:
            # Other ranks died or went another way. What this one would answer may be wrong.
            _log.exception("the engine cannot go on")
            os._exit(1)

    def _serve(self, request: wire.Request) -> None:
        if not self._ranks.leads and isinstance(request.command, wire.READING):
            return
        reply = self._answer(request)
        if not isinstance(request.command, wire.READING):
            self._ranks.check_alike(reply.failure.reason if reply.failure else "")
        self._failpoints.hit(f"engine_{type(request.command).__name__}")
        if self._ranks.leads:
            self._connection.sendall(wire.frame(wire.encode(reply)))

    def _answer(self, request: wire.Request) -> wire.Reply:
        try:
            return wire.Reply(request.id, msgspec.Raw(wire.encode(self._execute(request.command))))
        except Exception as error:
            failure = failure_of(error, type(request.command).__name__)
            return wire.Reply(request.id, msgspec.Raw(wire.encode(None)), failure)

    def _execute(self, command: wire.Start | wire.Command) -> wire.Result:
        if isinstance(command, wire.Start):
            self._failpoints = Failpoints(command.options.failpoints)
            self._engine = PeftEngine(command.options, self._ranks)
            return self._engine.describe()
        return command.execute(self._engine)
