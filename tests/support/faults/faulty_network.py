"""A network between a client and a service that fails as planned: calls by their number, connections by their bytes.

It knows no RPC. A call is forwarded as bytes, its requests first and then its replies, whether it is unary or a stream;
one with the same bytes as an earlier one is that one again. Without a plan it forwards everything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum

import grpc

from paceline import errors
from paceline.rpc.status import abort

_MOMENT = 0.03
"""Seconds that a call is delayed if no other arrives."""
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 50),
)


class Fault(Enum):
    """What happens to a call. `lost` is gRPC's own UNAVAILABLE; the others' errors are explicit, and end it unread."""

    LOST = "lost before it arrives"
    UNAVAILABLE = "refused: the service is not available"
    BUSY = "refused: overloaded, with a time to retry"
    FULL = "refused: disk full, with a time to retry"
    DENIED = "refused: not allowed"
    TOO_LARGE = "refused: too large"
    LATE = "lost, and arrives later all the same"
    DELAYED = "overtaken by the next one"
    TWICE = "arrives twice"
    LEFT = "arrives, and its caller is lost at once"
    UNANSWERED = "arrives, and its replies are lost"
    BROKEN = "arrives, and is lost after its first reply"
    SILENT = "arrives, and is never answered, nor ended"


_REFUSALS = {
    Fault.UNAVAILABLE: errors.ShuttingDown("the service is stopping", retry_after=0.01),
    Fault.BUSY: errors.Overloaded("full", retry_after=0.01),
    Fault.FULL: errors.DiskFull("the volume is full; nothing was executed", retry_after=0.01),
    Fault.DENIED: errors.InvalidApiKey("is not known"),
    Fault.TOO_LARGE: errors.MessageTooLarge("is too large"),
}


@dataclass(frozen=True)
class Cut:
    """The end of every connection, once this number of bytes has passed in one direction since the last one."""

    is_up: bool
    """Whether bytes to the service count."""
    after: int
    refused: int
    """How many connections are refused afterwards."""


class FaultyNetwork(grpc.GenericRpcHandler):
    """Forwards calls to a port of this machine."""

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.struck: Counter[str] = Counter()
        """Faults and cuts that happened."""
        self._upstream = upstream
        self._faults: Mapping[int, Sequence[Fault]] = {}
        self._cuts: list[Cut] = []
        self._left: dict[bytes, list[Fault]] = {}
        """What the next arrivals of each call will suffer."""
        self._arrival = asyncio.Event()
        self._late: list[asyncio.Task[None]] = []
        self._is_calm = asyncio.Event()
        self._passed: Counter[bool] = Counter()
        self._refused = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FaultyNetwork]:
        """Forward until the block ends."""
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._upstream}", options=_OPTIONS)
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((self,))
        self._inner = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        wire = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = wire.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            wire.close()
            self._reset()
            await server.stop(None)
            await self.calm()
            await self._channel.close()

    async def fail(self, faults: Mapping[int, Sequence[Fault]], cuts: Sequence[Cut]) -> None:
        """From now on, have the calls with these numbers, counted from 1, suffer faults, and cut connections.

        A call that arrives again keeps its number, and suffers the next fault.
        """
        self._faults, self._cuts = faults, list(cuts)
        self._left.clear()
        self._passed.clear()

    async def calm(self) -> None:
        """End all faults. What is late arrives first."""
        await self.fail({}, ())
        self._refused = 0
        self._is_calm.set()
        await asyncio.gather(*self._late)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            given = context.invocation_metadata()
            metadata = tuple((key, value) for key, value in given if key.startswith("x-") or key == "authorization")
            call = _Forwarded(self._channel, method, [request async for request in requests], metadata)
            try:
                async for reply in self._troubled(call, context):
                    yield reply
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _troubled(self, call: _Forwarded, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        planned = self._faults.get(len(self._left) + 1, ())
        left = self._left.setdefault(call.content, list(planned))
        fault = left.pop(0) if left else None
        self._arrival.set()
        self._arrival = asyncio.Event()
        if fault is not None:
            self.struck[fault.name] += 1
        match fault:
            case Fault.UNAVAILABLE | Fault.BUSY | Fault.FULL | Fault.DENIED | Fault.TOO_LARGE:
                await abort(context, _REFUSALS[fault])
            case Fault.LATE:
                self._late.append(asyncio.create_task(self._deliver_late(call)))
            case Fault.DELAYED:
                await self._wait_for_another()
            case Fault.TWICE:
                await asyncio.gather(call.replies(), call.replies(), return_exceptions=True)
            case Fault.LEFT:
                with suppress(TimeoutError, grpc.aio.AioRpcError):
                    await asyncio.wait_for(call.replies(), _MOMENT / 10)
            case Fault.UNANSWERED | Fault.SILENT:
                with suppress(grpc.aio.AioRpcError):
                    await call.replies()
        if fault in {Fault.LOST, Fault.LATE, Fault.LEFT, Fault.UNANSWERED}:
            await _lose(context)
        if fault is Fault.SILENT:
            await asyncio.Event().wait()  # until the caller leaves
        async for reply in call.stream():
            yield reply
            if fault is Fault.BROKEN:
                await _lose(context)

    async def _wait_for_another(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrival.wait(), _MOMENT)

    async def _deliver_late(self, call: _Forwarded) -> None:
        """Forward a call whose caller has left, once another has arrived or the network is calm."""
        arrival, calm = (asyncio.create_task(event.wait()) for event in (self._arrival, self._is_calm))
        await asyncio.wait({arrival, calm}, return_when=asyncio.FIRST_COMPLETED)
        arrival.cancel()
        calm.cancel()
        with suppress(grpc.aio.AioRpcError):
            await call.replies()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refused:
            self._refused -= 1
            writer.transport.abort()
            return
        with suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner)
            with self._kept(writer), self._kept(inner_writer):
                await asyncio.gather(self._pass(reader, inner_writer, True), self._pass(inner_reader, writer, False))

    @contextmanager
    def _kept(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_up: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                self._passed[is_up] += len(data)
                cut = self._cuts[0] if self._cuts else None
                if cut is not None and cut.is_up == is_up and self._passed[is_up] >= cut.after:
                    writer.write(data[: len(data) - (self._passed[is_up] - cut.after)])
                    self._cut(cut)
                    return
                writer.write(data)
                await writer.drain()
        writer.close()

    def _cut(self, cut: Cut) -> None:
        self.struck["cut up" if cut.is_up else "cut down"] += 1
        self._cuts.remove(cut)
        self._passed.clear()
        self._refused = cut.refused
        self._reset()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.close()  # what was written before arrives


@dataclass(frozen=True)
class _Forwarded:
    """A call that can be made to the service any number of times."""

    channel: grpc.aio.Channel
    method: str
    requests: list[bytes]
    metadata: tuple[tuple[str, str | bytes], ...]

    @property
    def content(self) -> bytes:
        """All that is sent."""
        return b"\n".join([self.method.encode(), *self.requests])

    async def stream(self) -> AsyncIterator[bytes]:
        """Call the service and yield its replies; leave it if the caller does. Raises AioRpcError."""
        call = self.channel.stream_stream(self.method)(iter(self.requests), metadata=self.metadata)
        try:
            async for reply in call:
                yield reply
        finally:
            call.cancel()

    async def replies(self) -> list[bytes]:
        """Call the service and return its replies. Raises AioRpcError."""
        return [reply async for reply in self.stream()]


async def _lose(context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
