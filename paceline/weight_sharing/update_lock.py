"""Lock over a Unix socket with which a trainer writes the weights that a sampler lends (bridge `shared`).

Each message is one line of JSON: the writer announces what it is about to write; the sampler answers when it may start;
the writer reports that it is done; the sampler answers when the version is active. If the writer dies, the socket
closes, and the sampler detects partly written weights.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from paceline.errors import CATALOG, BaseMismatch, BaseUnavailable, Internal

SOCKET = "writes"

_TURN_SECONDS = 60.0
"""How long a writer waits for the lock: the first write waits until requests to the base model have finished."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """The writer's announcement of a write."""

    generation: str
    """Generation of the weights to write."""
    run_id: str
    version: int
    tenant: str
    """Owner of the run."""


@dataclass(frozen=True, slots=True)
class WriteTurn:
    """The sampler's answer."""

    refusal: str = ""
    """Reason of the error; empty if the write is accepted."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The writer's report that all weights were written."""

    done: bool = True


@contextmanager
def write_turn(directory: Path, request: WriteRequest) -> Iterator[None]:
    """Hold the lock while the block writes the weights; afterwards the version is active.

    Raises BaseUnavailable if the sampler is not running or ends meanwhile, and the error with which it refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(_TURN_SECONDS)
            link.connect(str(directory / SOCKET))
            with cast("BinaryIO", link.makefile("rwb")) as lines:
                _say(lines, request)
                yield
                _say(lines, WriteDone())
    except OSError as error:
        raise BaseUnavailable(f"the sampler that lends its weights in {directory} does not answer: {error}.") from error


def decode_request(line: bytes) -> WriteRequest:
    """Decode a writer's first line. Raises BaseMismatch."""
    try:
        return msgspec.json.decode(line, type=WriteRequest)
    except msgspec.MsgspecError as error:
        raise BaseMismatch(f"a writer of base weights said {line[:100]!r}: {error}.") from error


def _say(lines: BinaryIO, message: WriteRequest | WriteDone) -> None:
    lines.write(msgspec.json.encode(message) + b"\n")
    lines.flush()
    answer = lines.readline()
    if not answer:
        raise ConnectionError("it closed the connection")
    turn = msgspec.json.decode(answer, type=WriteTurn)
    if turn.refusal:
        raise CATALOG.get(turn.refusal, Internal)(turn.message)
