"""The engine's side of the pipe: executes commands one at a time, in order of arrival.

A command that saves takes the run's state in its turn; a second thread writes it, in the same order, and answers.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from functools import partial
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
        self._unfinished: SimpleQueue[tuple[wire.Request, wire.Unfinished]] = SimpleQueue()
        self._sending = threading.Lock()
        self._failpoints = Failpoints("")

    def serve(self) -> NoReturn:
        """Answer commands for ever. The process ends, whatever it is doing, when the other end closes."""
        threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._finish, daemon=True).start()
        while True:
            request = self._requests.get()
            reply, rest = self._answer(request, partial(self._execute, request.command))
            self._failpoints.hit(f"engine_{type(request.command).__name__}")
            self._send(reply)
            if rest is not None:
                self._unfinished.put((request, rest))

    def _finish(self) -> NoReturn:
        while True:
            request, rest = self._unfinished.get()
            reply, _ = self._answer(request, rest.finish)
            self._failpoints.hit(f"engine_{type(request.command).__name__}_written")
            self._send(reply)

    def _send(self, reply: wire.Reply) -> None:
        with self._sending:
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

    def _answer(
        self, request: wire.Request, execute: Callable[[], wire.Result | wire.Unfinished]
    ) -> tuple[wire.Reply, wire.Unfinished | None]:
        """Return the reply, and what is left to do after it."""
        nothing = msgspec.Raw(wire.encode(None))
        try:
            result = execute()
            if isinstance(result, wire.Unfinished):
                return wire.Reply(request.id, nothing, is_last=False), result
            return wire.Reply(request.id, msgspec.Raw(wire.encode(result))), None
        except PacelineError as error:
            return wire.Reply(request.id, nothing, wire.Failure.of(error)), None
        except Exception:
            error_id = uuid.uuid4().hex
            _log.exception("%s failed, error_id=%s", type(request.command).__name__, error_id)
            unforeseen = Internal("the engine failed; its log has the error_id.", metadata={"error_id": error_id})
            return wire.Reply(request.id, nothing, wire.Failure.of(unforeseen)), None

    def _execute(self, command: wire.Start | wire.Command) -> wire.Result | wire.Unfinished:
        if isinstance(command, wire.Start):
            self._failpoints = Failpoints(command.options.failpoints)
            self._engine = PeftEngine(command.options)
            return self._engine.describe()
        return command.execute(self._engine)
