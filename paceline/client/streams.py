"""Answers that arrive in parts: iterated once, from any thread or event loop, and cancelled when they are left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any, Generic, Self, TypeVar

import grpc

from paceline import errors
from paceline.client.transport import Transport

T = TypeVar("T")


class Stream(Generic[T]):
    """Items of a response stream: iterate once, with `for` or `async for`.

    The request is sent at the first iteration and counts as a call in flight until the stream ends.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._reading: asyncio.Task[Any] | None = None
        """The task that waits for the next message."""
        self._closed = False
        """Whether no more items are wanted. Set on the thread that closes; everything else is set on THREAD."""
        self._ended = False
        """Whether the call, if there was one, was ended and its place among the calls in flight released."""

    def __iter__(self) -> Generator[T]:
        try:
            while not self._closed:
                item = self._transport.submit(self._next()).result()
                if item is None or self._closed:
                    return
                yield item
        finally:
            self.close()

    async def __aiter__(self) -> AsyncGenerator[T]:
        try:
            while not self._closed:
                item = await self._transport.submit(self._next())
                if item is None or self._closed:
                    return
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the rest of the stream, from any thread. An iteration in progress gets no more and ends.

        Does not block; closing twice does nothing.
        """
        self._closed = True
        self._transport.run_soon(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _take(self) -> T | None:
        """Return the next item; None at the end. Opens `_call` if there is none. Raises PacelineError."""
        raise NotImplementedError

    async def _next(self) -> T | None:
        if self._closed:
            return None
        self._reading = asyncio.current_task()
        try:
            item = await self._take()
        except (asyncio.CancelledError, errors.PacelineError):
            if self._closed:  # the reader asked for no more, so how the stream ended is not its concern
                return None
            raise
        finally:
            self._reading = None
        if item is None:
            self._end()
        return item

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._call is not None:
            self._transport.end_stream(self._call)
        elif self._reading is not None:  # it waits to be sent, or for the first message; cancelling it ends the call
            self._reading.cancel()
