"""Streaming of sampled tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Self

import grpc

from paceline import codec, errors
from paceline.client.retry import explain
from paceline.client.transport import Metadata, Transport, read
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import StreamedTokens

StreamCall = grpc.aio.UnaryStreamCall[pb.SampleStreamRequest, pb.SampleStreamResponse]


class SampleStream:
    """Completions in progress: iterate once, with `for` or `async for`.

    The request is sent at the first iteration and counts as a call in flight until the stream ends. Leaving the loop
    early cancels it on the server; use `with` or `async with` to cancel it also if an exception that left the loop is
    kept.

    Keep reading: a stream that is not read for the service's `reader_seconds` ends with ReaderStalled, after what had
    already been sent. A stream whose connection is lost ends with Unavailable. `metadata["received_tokens"]` of each
    error is the number of tokens received.
    """

    def __init__(self, transport: Transport, request: pb.SampleStreamRequest, metadata: Metadata) -> None:
        self._transport = transport
        self._request = request
        self._metadata = metadata
        self._call: StreamCall | None = None
        self._ended = False
        self._received = 0
        """Number of tokens received."""

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
        """Cancel the rest of the stream. Does not block; closing twice does nothing."""
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
        self._received += len(message.tokens)
        return codec.delta_from_proto(message)

    async def _read(self) -> pb.SampleStreamResponse | None:
        if self._call is None:
            method, seconds = self._transport.sampler.SampleStream, self._transport.timeouts.sampling
            self._call, first = await self._transport.open_stream(method, self._request, seconds, self._metadata)
            return first
        try:
            return await read(self._call)
        except grpc.aio.AioRpcError as failure:
            raise self._explained(failure) from failure

    def _explained(self, failure: grpc.aio.AioRpcError) -> errors.PacelineError:
        """Return the error that ended the stream, with the number of tokens received."""
        error, _ = explain(failure)
        error.metadata["received_tokens"] = str(self._received)
        if isinstance(error, errors.Unavailable):
            came = f"{self._received} tokens of the stream had come; sample again for the rest"
            message = f"{self._transport.connection.address}: {error.message}; {came}"
            return type(error)(message, field=error.field, metadata=error.metadata, retry_after=error.retry_after)
        return error

    def _end(self) -> None:
        if self._call is not None and not self._ended:
            self._transport.end_stream(self._call)
        self._ended = True
