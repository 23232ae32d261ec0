"""Tokens of a stream, as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Self

import grpc

from paceline import codec
from paceline.client.retry import explain
from paceline.client.transport import Metadata, Transport, read
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import StreamedTokens

StreamCall = grpc.aio.UnaryStreamCall[pb.SampleStreamRequest, pb.SampleStreamResponse]


class SampleStream:
    """Completions under way: iterate with `for` or with `async for`, once.

    The request is sent at the first step and counts as a call in flight until the stream ends. Leaving the loop early
    cancels it on the server; `with` and `async with` do so also when the loop was left by an exception that is kept.
    """

    def __init__(self, transport: Transport, request: pb.SampleStreamRequest, metadata: Metadata) -> None:
        self._transport = transport
        self._request = request
        self._metadata = metadata
        self._call: StreamCall | None = None
        self._ended = False

    def __iter__(self) -> Generator[StreamedTokens]:
        try:
            while (delta := self._transport.submit(self._next()).result()) is not None:
                yield delta
        finally:
            self.close()

    async def __aiter__(self) -> AsyncGenerator[StreamedTokens]:
        try:
            while (delta := await self._transport.submit(self._next())) is not None:
                yield delta
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what is left of the stream. Does not block; closing twice does nothing."""
        self._transport.soon(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _next(self) -> StreamedTokens | None:
        message = None if self._ended else await self._read()
        if message is None:
            self._end()
            return None
        return codec.delta_from_proto(message)

    async def _read(self) -> pb.SampleStreamResponse | None:
        if self._call is None:
            method, seconds = self._transport.sampler.SampleStream, self._transport.timeouts.sampling
            self._call, first = await self._transport.open_stream(method, self._request, seconds, self._metadata)
            return first
        try:
            return await read(self._call)
        except grpc.aio.AioRpcError as failure:
            error, _ = explain(failure)
            raise error from failure

    def _end(self) -> None:
        if self._call is not None and not self._ended:
            self._transport.end_stream(self._call)
        self._ended = True
