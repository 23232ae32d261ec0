"""The engine's side of the pipe: executes commands one at a time, in order of arrival."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from paceline.errors import Internal, PacelineError
from trainer_service.engine import wire
from trainer_service.engine.base import TrainerEngine
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.failpoints import Failpoints

_log = logging.getLogger(__name__)


class Worker:
    """Serves one engine to the process at the other end of `connection`."""

    _engine: TrainerEngine

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._requests: SimpleQueue[wire.Request] = SimpleQueue()
        self._failpoints = Failpoints("")

    def serve(self) -> NoReturn:
        """Answer commands for ever. The process ends, whatever it is doing, when the other end closes."""
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            request = self._requests.get()
            reply = self._answer(request)
            self._failpoints.hit(f"engine_{type(request.command).__name__}")
            self._connection.sendall(wire.frame(wire.encode(reply)))

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

    def _answer(self, request: wire.Request) -> wire.Reply:
        nothing = msgspec.Raw(wire.encode(None))
        try:
            return wire.Reply(request.id, msgspec.Raw(wire.encode(self._execute(request.command))))
        except PacelineError as error:
            return wire.Reply(request.id, nothing, wire.Failure.of(error))
        except Exception:
            error_id = uuid.uuid4().hex
            _log.exception("%s failed, error_id=%s", type(request.command).__name__, error_id)
            unforeseen = Internal("the engine failed; its log has the error_id.", metadata={"error_id": error_id})
            return wire.Reply(request.id, nothing, wire.Failure.of(unforeseen))

    def _execute(self, command: wire.Start | wire.Command) -> wire.Result:
        if isinstance(command, wire.Start):
            self._failpoints = Failpoints(command.options.failpoints)
            self._engine = PeftEngine(command.options)
            return self._engine.describe()
        return command.execute(self._engine)
