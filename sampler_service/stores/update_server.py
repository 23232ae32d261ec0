"""The sampler's end of the lock with which a trainer's engine writes the weights (bridge `shared`)."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from pathlib import Path

import msgspec

from paceline import errors
from paceline.log import get_logger
from paceline.weight_sharing import SOCKET, WriteReply, decode_request
from sampler_service.stores.in_place import InPlaceSlot

_WRITE_SECONDS = 60.0
"""Longest duration of a write; a stopped writer would block every request."""

_log = get_logger(__name__)


class UpdateServer:
    """Serves writers one at a time; a connection that closes early is an interrupted write."""

    def __init__(self, slot: InPlaceSlot, directory: Path, generation: str) -> None:
        """Listen in `directory`, beside the weights; accept only writers of this `generation`."""
        self._slot = slot
        self._path = directory / SOCKET
        self._generation = generation
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            request = decode_request(await reader.readline())
            if request.generation != self._generation:
                raise errors.BaseUnavailable("the weights are no longer those that the writer means")
            async with self._slot.writing(request):
                _say(writer, WriteReply())
                async with asyncio.timeout(_WRITE_SECONDS):
                    if not await reader.readline():
                        raise ConnectionError("the writer died")
            _say(writer, WriteReply())
        except errors.PacelineError as error:
            _log.warning("write refused", reason=error.reason, error=error.message)
            _say(writer, WriteReply(error.reason, error.message))
        except Exception:  # always answer: the writer must not mistake silence for its turn
            _log.exception("write broken off; nothing is begun until the weights are written again")
            _say(writer, WriteReply(errors.EngineUnavailable.reason, "the write was broken off"))
        finally:
            writer.close()


def _say(writer: StreamWriter, turn: WriteReply) -> None:
    writer.write(msgspec.json.encode(turn) + b"\n")
