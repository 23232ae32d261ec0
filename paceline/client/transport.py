"""The channel, the event loop thread that owns it, retries, and the limit on calls in flight."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import grpc

from paceline import errors
from paceline.client.config import RetryPolicy, Timeouts
from paceline.client.futures import PacelineFuture
from paceline.client.retry import with_retries
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceStub
from paceline.rpc.channel import TlsFiles, open_channel
from paceline.rpc.identity import API_KEY_KEY
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

if TYPE_CHECKING:
    from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceAsyncStub
    from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceAsyncStub
    from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

T = TypeVar("T")
P = ParamSpec("P")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Metadata = Sequence[tuple[str, str]]


class Transport:
    """One connection. grpc.aio objects belong to one event loop, so a thread of its own runs it and all calls."""

    def __init__(
        self,
        target: str,
        api_key: str,
        tls: TlsFiles | None,
        *,
        timeouts: Timeouts,
        retry: RetryPolicy,
        max_in_flight: int,
    ) -> None:
        self.timeouts = timeouts
        self.retry = retry
        self._metadata: Metadata = ((API_KEY_KEY, f"Bearer {api_key}"),) if api_key else ()
        self._room = asyncio.Semaphore(max_in_flight)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name="paceline-client", daemon=True)
        thread.start()
        self._loop = loop
        self._stop = weakref.finalize(self, _shut_down, loop, thread)
        channel = asyncio.run_coroutine_threadsafe(_open(target, tls), loop).result()
        self._stop.detach()
        self._stop = weakref.finalize(self, _shut_down, loop, thread, channel)
        self.trainer: TrainerServiceAsyncStub = TrainerServiceStub(channel)
        self.sampler: SamplerServiceAsyncStub = SamplerServiceStub(channel)
        self.gateway: GatewayServiceAsyncStub = GatewayServiceStub(channel)

    def submit(self, work: Coroutine[Any, Any, T], *, cancellable: bool = True) -> PacelineFuture[T]:
        """Run a coroutine on the client's thread. Work submitted from one thread starts in order of submission."""
        if not self._stop.alive:
            work.close()
            raise errors.Cancelled("the client is closed")
        future = asyncio.run_coroutine_threadsafe(self._guard(work), self._loop)
        return PacelineFuture(future, cancellable=cancellable)

    def soon(self, action: Callable[[], object]) -> None:
        """Run a function on the client's thread without waiting for it; nothing if the client is closed."""
        if self._stop.alive:
            self._loop.call_soon_threadsafe(action)

    async def start(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
        request: Request,
        seconds: float,
        metadata: Metadata = (),
    ) -> asyncio.Task[Reply]:
        """Wait for room, then start a call with its retries. Room is given in the order of asking."""
        await self._room.acquire()
        task = asyncio.ensure_future(self._call(method, request, seconds, metadata))
        task.add_done_callback(lambda _: self._room.release())
        return task

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
        request: Request,
        seconds: float,
        metadata: Metadata = (),
    ) -> Reply:
        """Call and return the reply. `seconds` is the deadline of each attempt. Raises PacelineError."""
        return await (await self.start(method, request, seconds, metadata))

    def query(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply], request: Request
    ) -> PacelineFuture[Reply]:
        """Call something that answers at once."""
        return self.submit(self.call(method, request, self.timeouts.query))

    async def open_stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Reply],
        request: Request,
        seconds: float,
        metadata: Metadata = (),
    ) -> tuple[grpc.aio.UnaryStreamCall[Request, Reply], Reply | None]:
        """Wait for room and open a stream; return it with its first message (None if there is none).

        Retries end with the first message. The caller gives the room back with `end_stream`.
        """

        async def first() -> tuple[grpc.aio.UnaryStreamCall[Request, Reply], Reply | None]:
            stream = method(request, timeout=seconds, metadata=(*self._metadata, *metadata))
            return stream, await read(stream)

        await self._room.acquire()
        try:
            return await with_retries(first, self.retry)
        except BaseException:
            self._room.release()
            raise

    def end_stream(self, stream: grpc.aio.UnaryStreamCall[Request, Reply]) -> None:
        """Cancel a stream on the server too, if it has not ended, and give its room back."""
        stream.cancel()
        self._room.release()

    def close(self) -> None:
        """Cancel what is under way, close the channel and end the thread. Closing twice does nothing."""
        self._stop()

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
        request: Request,
        seconds: float,
        metadata: Metadata,
    ) -> Reply:
        async def attempt() -> Reply:
            return await method(request, timeout=seconds, metadata=(*self._metadata, *metadata))

        return await with_retries(attempt, self.retry)

    async def _guard(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._stop.alive:
                raise
            raise errors.Cancelled("the client was closed before the answer came") from None


class Connected:
    """Something that calls through a transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport


C = TypeVar("C", bound=Connected)


def blocking(method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[C, P], T]:
    """Make the blocking twin of a method whose name ends in `_async`. Not for use inside an event loop."""

    @wraps(method)
    def twin(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.transport.submit(method(self, *args, **kwargs)).result()

    twin.__name__ = method.__name__.removesuffix("_async")
    twin.__qualname__ = method.__qualname__.removesuffix("_async")
    return twin


async def read(stream: grpc.aio.UnaryStreamCall[Request, Reply]) -> Reply | None:
    """Return a stream's next message; None at its end. Raises AioRpcError."""
    message = await stream.read()
    return None if message is grpc.aio.EOF else cast("Reply", message)


async def _open(target: str, tls: TlsFiles | None) -> grpc.aio.Channel:
    return open_channel(target, tls)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _shut_down(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, channel: grpc.aio.Channel | None = None
) -> None:
    asyncio.run_coroutine_threadsafe(_end(loop, channel), loop)
    # The last reference may go on the client's own thread, which cannot wait for itself.
    if threading.current_thread() is not thread:
        thread.join()


async def _end(loop: asyncio.AbstractEventLoop, channel: grpc.aio.Channel | None) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if channel is not None:
        await channel.close()
    await loop.shutdown_default_executor()
    loop.stop()
