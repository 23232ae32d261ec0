"""The gRPC channel, the limit on calls in flight, and the client's own threads."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import wraps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, cast

import grpc

from paceline import errors
from paceline.client.connection import Connection
from paceline.client.futures import IssuedCommand, PacelineFuture, UnansweredCommands
from paceline.client.loop_thread import OWNER, THREAD, check_may_wait
from paceline.client.retry import RetryLog, call_name, with_retries
from paceline.client.traces import calling
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceStub
from paceline.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import API_KEY_KEY
from paceline.rpc.status import error_from_rpc, is_from_grpc
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

if TYPE_CHECKING:
    from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceAsyncStub
    from paceline.metrics.v1.metrics_service_pb2_grpc import MetricsServiceAsyncStub
    from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceAsyncStub
    from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

T = TypeVar("T")
P = ParamSpec("P")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Metadata = Sequence[tuple[str, str]]
Limit = Literal["training", "sampling", "query"]
"""The field of Timeouts that limits a call."""

_PROBE = "/paceline.gateway.v1.GatewayService/WhoAmI"
_PROBE_SECONDS = 0.2
_HTTP1_SIGNS = ("http1.x", "ALPN")
"""Parts of gRPC's reasons for a peer that speaks HTTP/1.1, without and with TLS."""
_log = logging.getLogger("paceline")


class Transport:
    """One connection; all its calls run on THREAD."""

    def __init__(self, connection: Connection) -> None:
        OWNER.claim(self)
        self.connection = connection
        self.timeouts, self._retry = connection.timeouts, connection.retry
        key = connection.api_key
        self._metadata: Metadata = ((API_KEY_KEY, f"Bearer {key}"),) if key else ()
        self._in_flight = asyncio.Semaphore(connection.max_in_flight)
        self._retries = RetryLog()
        self._warnings: set[str] = set()
        """Warnings that are not repeated."""
        self._unanswered = UnansweredCommands()
        self._connecting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks of this connection that have not ended."""
        self._loop = THREAD.start()
        self._channel = _open(connection, self._loop)
        # Also runs at process exit: issued commands are awaited while the loop is still running.
        self._stop = weakref.finalize(
            self, _shut_down, self._loop, self._channel, self._tasks, self._unanswered, self.timeouts.close
        )
        self.trainer: TrainerServiceAsyncStub = TrainerServiceStub(self._channel)
        self.sampler: SamplerServiceAsyncStub = SamplerServiceStub(self._channel)
        self.metrics: MetricsServiceAsyncStub = MetricsServiceStub(self._channel)
        self.gateway: GatewayServiceAsyncStub = GatewayServiceStub(self._channel)

    def submit(self, work: Coroutine[Any, Any, T]) -> PacelineFuture[T]:
        """Run a coroutine on THREAD. Work submitted from one thread starts in order of submission."""
        return PacelineFuture(self._submit(work))

    def submit_command(self, issued: IssuedCommand, work: Coroutine[Any, Any, T]) -> PacelineFuture[T]:
        """Run a training command, which cannot be cancelled; closing the client waits for it."""
        future = self._submit(work, if_closed=errors.Fate.UNKNOWN)
        self._unanswered.add(issued, future, self._loop)
        return PacelineFuture(future, issued)

    def run_soon(self, action: Callable[[], object]) -> None:
        """Run a function on THREAD without waiting for it; do nothing if the client is closed."""
        if self._stop.alive and OWNER.is_here:
            self._loop.call_soon_threadsafe(action)

    def warn_once(self, message: str) -> None:
        """Log a warning, unless this connection has logged it before."""
        if message not in self._warnings:
            self._warnings.add(message)
            _log.warning("%s", message)

    async def call(
        self, method: Callable[..., Awaitable[Reply]], request: object, limit: Limit, metadata: Metadata = ()
    ) -> Reply:
        """Wait for the limit on calls in flight, in FIFO order, then call a method, with retries; return its reply.

        `method` is a stub's method, or takes the same arguments. `limit` names the timeout of each attempt. Raises
        PacelineError.
        """

        async def attempt() -> Reply:
            with calling(call_name(request)) as trace:
                return await method(
                    request, timeout=self._seconds(limit), metadata=(*self._metadata, *metadata, *trace)
                )

        await self._connected()
        async with self._in_flight:
            return await self._with_retries(attempt, request, limit)

    def query(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply], request: Request
    ) -> PacelineFuture[Reply]:
        """Call a method that answers immediately."""
        return self.submit(self.call(method, request, "query"))

    async def open_stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Reply],
        request: Request,
        limit: Limit,
        metadata: Metadata = (),
    ) -> tuple[grpc.aio.UnaryStreamCall[Request, Reply], Reply | None]:
        """Wait for the limit on calls in flight and open a stream; return it with its first message (None if empty).

        There are no retries after the first message. The caller must call `end_stream`.
        """

        async def first() -> tuple[grpc.aio.UnaryStreamCall[Request, Reply], Reply | None]:
            with calling(call_name(request)) as trace:
                stream = method(request, timeout=self._seconds(limit), metadata=(*self._metadata, *metadata, *trace))
                return stream, await read(stream)

        await self._connected()
        await self._in_flight.acquire()
        try:
            return await self._with_retries(first, request, limit)
        except BaseException:
            self._in_flight.release()
            raise

    def end_stream(self, stream: grpc.aio.UnaryStreamCall[Request, Reply]) -> None:
        """Cancel a stream, on the server too, if it has not ended, and release its place among the calls in flight."""
        stream.cancel()
        self._in_flight.release()

    def error(self, failure: grpc.aio.AioRpcError, request: object, limit: Limit) -> errors.PacelineError:
        """Return the error of a failed call.

        It names the gateway if that did not answer, and the setting if the client's own timeout ended the call.
        """
        error = error_from_rpc(failure)
        if not is_from_grpc(failure):
            return error
        if isinstance(error, errors.UpstreamUnavailable):
            remedy = "see whether it runs and can be reached, and start it again if not"
            message = f"the gateway at {self.connection.address} does not answer; {remedy} ({error.message})"
            return errors.UpstreamUnavailable(message, field="address")
        if failure.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return error
        remedy = f"give ServiceClient(timeouts=Timeouts({limit}=...)) a longer one"
        if isinstance(request, sampler_pb.SampleRequest | sampler_pb.SampleStreamRequest):
            remedy = remedy if request.params.HasField("max_tokens") else f"set SamplingParams.max_tokens, or {remedy}"
        return errors.TimedOut(f"not finished within {self._seconds(limit):g} s (Timeouts.{limit}); {remedy}")

    def close(self, seconds: float | None = None) -> None:
        """Wait for commands, cancel all other calls and close the channel.

        Waits at most `seconds`, by default Timeouts.close. Closing twice does nothing.
        """
        if not OWNER.is_here:
            return
        try:
            if self._stop.alive and not THREAD.is_current:
                asyncio.run_coroutine_threadsafe(self._until_answered(seconds), self._loop).result()
        finally:
            self._stop_now()

    async def close_async(self, seconds: float | None = None) -> None:
        """Like `close`, from any event loop."""
        if not OWNER.is_here:
            return
        try:
            if self._stop.alive:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._until_answered(seconds), self._loop))
        finally:
            self._stop_now()

    def _seconds(self, limit: Limit) -> float:
        seconds: float = getattr(self.timeouts, limit)
        return seconds

    def _until_answered(self, seconds: float | None) -> Coroutine[Any, Any, None]:
        return self._unanswered.wait(self.timeouts.close if seconds is None else seconds)

    def _stop_now(self) -> None:
        self._unanswered.close()
        self._stop()

    def _submit(self, work: Coroutine[Any, Any, T], if_closed: errors.Fate | None = None) -> Future[T]:
        """Run a coroutine. `if_closed` is the fate of its command if the client is closed before it ends."""
        try:
            OWNER.check()
            if not self._stop.alive:
                raise errors.Cancelled(
                    "the client is closed; make calls inside its `with` block, or create another ServiceClient"
                )
        except errors.PacelineError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(self._guard(work, if_closed), self._loop)

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that ends with the connection. Only on THREAD."""
        return self._track(asyncio.ensure_future(work))

    def _track(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connected(self) -> None:
        """Wait for the first connection; concurrent first calls share the wait."""
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            self._connecting = self.start_task(self._connect())
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        seconds = self.timeouts.connect
        try:
            await asyncio.wait_for(self._channel.channel_ready(), seconds)
        except TimeoutError:
            reason = await self._connection_failure()
            address = self.connection.address
            if any(sign in reason for sign in _HTTP1_SIGNS):
                message = (
                    f"{address} is an HTTP/1.1 port, not a gateway's gRPC port ({reason}); give the gRPC port, 50050 "
                    "by default, as PACELINE_ADDRESS or ServiceClient(address=...). The gateway's HTTP port, 50053 "
                    "with `paceline up`, is for HTTP clients"
                )
            else:
                message = (
                    f"no gateway answers at {address} within {seconds:g} s ({reason}); start it, or give its host:port "
                    "as PACELINE_ADDRESS or ServiceClient(address=...), and its certificate authorities as tls_ca if "
                    "it uses TLS"
                )
            raise errors.UpstreamUnavailable(message, field="address") from None

    async def _connection_failure(self) -> str:
        """Return gRPC's reason why there is no connection."""
        probe: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_PROBE)
        try:
            await probe(b"", timeout=_PROBE_SECONDS)
        except grpc.aio.AioRpcError as failure:
            return failure.details() or failure.code().name
        return "the connection took too long"

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]], request: object, limit: Limit) -> T:
        def convert(failure: grpc.aio.AioRpcError) -> errors.PacelineError:
            return self.error(failure, request, limit)

        try:
            return await with_retries(attempt, self._retry, self._retries, call_name(request), convert)
        except errors.InvalidApiKey as error:
            raise self.connection.refused_key(error) from error

    async def _guard(self, work: Coroutine[Any, Any, T], if_closed: errors.Fate | None) -> T:
        if (task := asyncio.current_task()) is not None:
            self._track(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._stop.alive:
                raise
            error = errors.Cancelled("the client was closed before the answer arrived")
            error.fate = if_closed
            raise error from None


class Connected:
    """Base of clients that call through a transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def __dir__(self) -> list[str]:
        return sorted(name for name in super().__dir__() if not name.startswith("_") and name != "transport")


C = TypeVar("C", bound=Connected)


def blocking(method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[C, P], T]:
    """Return the blocking twin of a method whose name ends in `_async`. Not for use inside an event loop.

    The twin raises Forked and Unsupported like `check_may_wait`, before anything is sent.
    """

    @wraps(method)
    def twin(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_may_wait()
        return self.transport.submit(method(self, *args, **kwargs)).result()

    twin.__name__ = method.__name__.removesuffix("_async")
    twin.__qualname__ = method.__qualname__.removesuffix("_async")
    return twin


async def read(stream: grpc.aio.UnaryStreamCall[Request, Reply]) -> Reply | None:
    """Return a stream's next message; None at its end. Raises AioRpcError."""
    message = await stream.read()
    return None if message is grpc.aio.EOF else cast("Reply", message)


def _open(connection: Connection, loop: asyncio.AbstractEventLoop) -> grpc.aio.Channel:
    """Open a channel of the loop, from any thread."""

    async def opened() -> grpc.aio.Channel:
        return open_channel(connection.address, connection.tls)

    if THREAD.is_current:
        return open_channel(connection.address, connection.tls)
    return asyncio.run_coroutine_threadsafe(opened(), loop).result()


def _shut_down(
    loop: asyncio.AbstractEventLoop,
    channel: grpc.aio.Channel,
    tasks: set[asyncio.Task[Any]],
    unanswered: UnansweredCommands,
    seconds: float,
) -> None:
    if not OWNER.is_here:
        return  # The loop's thread and the connection belong to the parent process.
    # The last reference may be dropped on the loop's thread, which cannot wait for itself.
    is_elsewhere = not THREAD.is_current
    try:
        if is_elsewhere:
            asyncio.run_coroutine_threadsafe(unanswered.wait(seconds), loop).result()
    finally:
        unanswered.close()
        ended = asyncio.run_coroutine_threadsafe(_end(channel, tasks), loop)
        if is_elsewhere:
            ended.result()


async def _end(channel: grpc.aio.Channel, tasks: set[asyncio.Task[Any]]) -> None:
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await channel.close()


class Worker:
    """Runs one function outside the event loop.

    Its thread starts immediately, because no thread can be started once the main thread has ended (Python 3.12), when
    previously issued commands may still be running. It is a daemon thread and does not keep the process alive.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="paceline-worker", daemon=True).start()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run the function and return its result or raise its error. May be called once."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        self._work.put(work)
        return await asyncio.wrap_future(future)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        if (work := self._work.get()) is not None:
            work()
