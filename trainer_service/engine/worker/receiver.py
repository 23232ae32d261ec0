"""The engine's end of the pipe from the service: requests, the same on every rank and in the same order."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from trainer_service.engine import messages
from trainer_service.engine.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 60.0
"""Rank 0 shares something this often, be it nothing, so that ranks can tell waiting from hanging."""


class RequestReceiver:
    """Receives requests, on rank 0 from `connection` and on the others from rank 0."""

    def __init__(self, connection: socket.socket, ranks: Ranks) -> None:
        self._connection = connection
        self._ranks = ranks
        self._payloads: SimpleQueue[bytes] = SimpleQueue()

    def start(self) -> None:
        """Begin to receive. The process ends, whatever it is doing, when the other end closes."""
        if self._ranks.leads:
            threading.Thread(target=self._receive, daemon=True).start()

    def take(self, *, wait: bool) -> list[messages.Request]:
        """Take all requests that wait, with `wait` at least one. All ranks must do this together."""
        while True:
            payloads = self._ranks.share_all(self._waiting(wait=wait) if self._ranks.leads else [])
            if payloads or not wait:
                return [messages.decode(payload, messages.Request) for payload in payloads]

    def _waiting(self, *, wait: bool) -> Sequence[bytes]:
        payloads: list[bytes] = []
        try:
            if wait:
                payloads.append(self._payloads.get(timeout=_IDLE_SECONDS))
            while True:
                payloads.append(self._payloads.get_nowait())
        except Empty:
            return payloads

    def _receive(self) -> None:
        # Waiting here, beside the engine, an orphan notices at once and frees its memory.
        try:
            with self._connection.makefile("rb") as stream:
                while header := stream.read(messages.LENGTH_BYTES):
                    self._payloads.put(stream.read(int.from_bytes(header, "little")))
        except Exception:
            _log.exception("the pipe to the service broke")
            os._exit(1)
        os._exit(0)
