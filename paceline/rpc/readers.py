"""Readers of response streams: one that takes nothing for too long, or leaves too much, has its call ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from paceline.errors import ReaderStalled

READER_SECONDS = 60.0
"""How long a message may wait until the reader takes it, where a service has no other setting."""


class Reader:
    """Whoever a stream's messages are written to.

    gRPC takes a message when the reader's windows have room for it, so a write waits for as long as nothing is read.
    One timer for each stream looks after its writes: a timeout for each message would cost more than sending it.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], seconds: float, patience: asyncio.Timeout) -> None:
        """Take what ends the call's task; see `reading`."""
        self.reason = ""
        """Why the call was ended; empty while it was not."""
        self._context = context
        self._seconds = seconds
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._begun = False
        self._since: float | None = None
        """When the message that is being written was."""
        self._timer = self._loop.call_later(seconds, self._look)

    async def write(self, message: Any) -> None:
        """Send a message; returns when there is room for the next. Raises ReaderStalled, by way of `reading`."""
        self._since = self._loop.time()
        if not self._begun:
            # On its own: a call whose first message never goes could not be ended with an error otherwise, since gRPC
            # would send the metadata that belongs to both twice.
            self._begun = True
            await self._context.send_initial_metadata(())
        await self._context.write(message)
        self._since = None

    def give_up(self, reason: str) -> None:
        """End the call with ReaderStalled, whatever it waits for. `reason` says what the reader did."""
        if not self.reason:
            self.reason = reason
            self._patience.reschedule(self._loop.time())

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        begun = self._loop.time() if self._since is None else self._since
        if begun + self._seconds <= self._loop.time():
            self.give_up(f"nothing was read for {self._seconds:g} s")
        else:
            self._timer = self._loop.call_at(begun + self._seconds, self._look)


_current: ContextVar[Reader] = ContextVar("paceline_reader")


def current_reader() -> Reader:
    """Return the reader of the stream that this call answers with. Raises LookupError where it answers with none."""
    return _current.get()


@asynccontextmanager
async def reading(context: grpc.aio.ServicerContext[Any, Any], seconds: float) -> AsyncIterator[None]:
    """Have a call's messages taken within `seconds` each while the block runs.

    Raises ReaderStalled when one is not, or when the reader was given up; what the block holds is freed by then.
    """
    reader: Reader | None = None
    try:
        async with asyncio.timeout(None) as patience:
            reader = Reader(context, seconds, patience)
            _current.set(reader)
            yield
    except TimeoutError as error:
        if reader is None or not reader.reason:
            raise
        raise ReaderStalled(f"{reader.reason}; read on without long pauses, or ask for less at a time") from error
    finally:
        if reader is not None:
            reader.close()
