"""How a trainer takes its turn to write the weights that a sampler lends: a socket beside them (bridge `shared`).

One line of JSON each way: the writer says what it is about to write; the sampler answers when it may; the writer says
that it is done; the sampler answers when the version is active. A writer that dies closes the socket, so that the
sampler knows of weights that were written in part.
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
"""How long a writer waits for its turn: for the first one, requests to the base model in progress have to end."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What is about to be written."""

    generation: str
    """Of the weights that it is meant for."""
    run_id: str
    version: int
    tenant: str
    """Who owns the run."""


@dataclass(frozen=True, slots=True)
class WriteTurn:
    """The sampler's answer."""

    refusal: str = ""
    """Reason of the error, if it is one."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class WriteDone:
    """Every weight was written."""

    done: bool = True


@contextmanager
def write_turn(directory: Path, request: WriteRequest) -> Iterator[None]:
    """Write the weights inside the block; after it the version is active.

    Raises BaseUnavailable when the sampler is not there or goes meanwhile, and what it refuses the write with.
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
