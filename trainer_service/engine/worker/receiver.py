"""The engine's end of the pipe from the service: every rank receives the same requests in the same order."""

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
"""Rank 0 shares requests at least this often, even if there are none, so that ranks can tell waiting from hanging."""


class RequestReceiver:
    """Receives requests: rank 0 from `connection`, the other ranks from rank 0."""

    def __init__(self, connection: socket.socket, ranks: Ranks) -> None:
        self._connection = connection
        self._ranks = ranks
        self._payloads: SimpleQueue[bytes] = SimpleQueue()

    def start(self) -> None:
        """Start receiving. The process ends when the other end closes, whatever it is doing."""
        if self._ranks.leads:
            threading.Thread(target=self._receive, daemon=True).start()

    def take(self, *, wait: bool) -> list[messages.Request]:
        """Return all waiting requests; with `wait`, at least one. All ranks must call this together."""
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
        # A thread beside the engine waits here, so that an orphaned process notices immediately and frees its memory.
        try:
            with self._connection.makefile("rb") as stream:
                while header := stream.read(messages.LENGTH_BYTES):
                    self._payloads.put(stream.read(int.from_bytes(header, "little")))
        except Exception:
            _log.exception("the pipe to the service broke")
            os._exit(1)
        os._exit(0)
