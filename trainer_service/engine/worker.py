"""The engine's side of the pipe: executes commands one at a time, in order of arrival."""

from __future__ import annotations

import logging
import os
import socket
import threading
from queue import Empty, SimpleQueue
from typing import NoReturn

import msgspec

from trainer_service.engine import wire
from trainer_service.engine.base import TrainerEngine
from trainer_service.engine.failures import failure_of
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.ranks import IDLE_SECONDS, Ranks
from trainer_service.failpoints import Failpoints

_log = logging.getLogger(__name__)


class Worker:
    """Serves one engine to the process at the other end of `connection`, together with the other ranks."""

    _engine: TrainerEngine

    def __init__(self, connection: socket.socket, ranks: Ranks) -> None:
        self._connection = connection
        self._ranks = ranks
        self._requests: SimpleQueue[bytes] = SimpleQueue()
        self._failpoints = Failpoints("")

    def serve(self) -> NoReturn:
        """Answer commands for ever. The process ends, whatever it is doing, when the other end closes."""
        if self._ranks.leads:
            threading.Thread(target=self._receive, daemon=True).start()
        try:
            while True:
                if payload := self._ranks.share(self._next()):
                    self._serve(wire.decode(payload, wire.Request))
        except Exception:
            # Other ranks died or went another way. What this one would answer may be wrong.
            _log.exception("the engine cannot go on")
            os._exit(1)

    def _receive(self) -> None:
        # Waiting here, beside the engine, an orphan notices at once and frees its memory.
        try:
            with self._connection.makefile("rb") as stream:
                while header := stream.read(wire.LENGTH_BYTES):
                    self._requests.put(stream.read(int.from_bytes(header, "little")))
        except Exception:
            _log.exception("the pipe to the service broke")
            os._exit(1)
        os._exit(0)

    def _next(self) -> bytes:
        """Wait for a request; only rank 0 gets any, and nothing now and then."""
        if not self._ranks.leads:
            return b""
        try:
            return self._requests.get(timeout=IDLE_SECONDS)
        except Empty:
            return b""

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
