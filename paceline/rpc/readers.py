"""Readers of response streams. A call ends if its reader reads nothing for too long, or leaves too much unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from paceline.errors import ReaderStalled

READER_SECONDS = 60.0
"""How long a message may wait until it is read, unless a service has another setting."""


class Reader:
    """The receiving side of a response stream.

    gRPC accepts a message when it fits the reader's flow-control windows, so a write blocks while nothing is
    read. One timer per stream watches its writes, because a timeout per message would cost more than sending it.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], seconds: float, patience: asyncio.Timeout) -> None:
        """`patience` is the timeout that ends the call's task; see `reading`."""
        self.reason = ""
        """Why the call was ended; empty if it was not."""
        self._context = context
        self._seconds = seconds
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._begun = False
        self._since: float | None = None
        """Start time of the write in progress; None if there is none."""
        self._timer = self._loop.call_later(seconds, self._look)

    async def write(self, message: Any) -> None:
        """Send a message and return when the windows admit the next. Raises ReaderStalled, through `reading`."""
        self._since = self._loop.time()
        if not self._begun:
            # Sent separately, so that a call whose first message is never sent can end with an error. Otherwise gRPC
            # would send the metadata twice, with the message and with the error.
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
        """Stop the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        begun = self._loop.time() if self._since is None else self._since
        if begun + self._seconds <= self._loop.time():
            self.give_up(f"nothing was read for {self._seconds:g} s")
        else:
            self._timer = self._loop.call_at(begun + self._seconds, self._look)


_current: ContextVar[Reader] = ContextVar("paceline_reader")

current_reader = _current.get
"""Return the reader of this call's response stream. Raises LookupError if the call has none."""


@asynccontextmanager
async def reading(context: grpc.aio.ServicerContext[Any, Any], seconds: float) -> AsyncIterator[None]:
    """Require that each of a call's messages is read within `seconds` while the block runs.

    Raises ReaderStalled if one is not, or after `Reader.give_up`; the block has released its resources by then.
    """
    patience = asyncio.timeout(None)
    reader = Reader(context, seconds, patience)
    _current.set(reader)
    try:
        async with patience:
            yield
    except TimeoutError as error:
        if not reader.reason:
            raise
        raise ReaderStalled(f"{reader.reason}; read on without long pauses, or ask for less at a time") from error
    finally:
        reader.close()
