"""A network between a client's process and a service that kills the process at a chosen place: a call, and a moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum

import grpc

from paceline.trainer.v1 import trainer_service_pb2 as pb

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
DISCARD = "discard"
"""Name of an OptimStep that discards the gradient."""


class Moment(Enum):
    """When the process is killed."""

    LOST = "before the call arrives, when those before it are answered"
    ON_ITS_WAY = "as the call arrives"
    ANSWERED = "when the call is answered, before the answer arrives"


@dataclass(frozen=True)
class Place:
    """Where a process is killed."""

    call: str
    """Name of an RPC, also of a command that travels in Execute, or DISCARD."""
    moment: Moment
    number: int = 1
    """Which of the process's calls of this name."""

    def __str__(self) -> str:
        return f"{self.call} {self.number}, {self.moment.value}"


class KillingNetwork(grpc.GenericRpcHandler):
    """Forwards calls to a port of this machine."""

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.has_killed = False
        """Whether the process has come to its place."""
        self._upstream = upstream
        self._place: Place | None = None
        self._kill: Callable[[], None] = lambda: None
        self._seen: Counter[str] = Counter()
        self._open: set[asyncio.Future[None]] = set()
        """One for each call that is not answered."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[KillingNetwork]:
        """Forward until the block ends."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._upstream}", options=_OPTIONS) as self._channel:
            server = grpc.aio.server(options=_OPTIONS)
            server.add_generic_rpc_handlers((self,))
            self.port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                yield self
            finally:
                await server.stop(None)

    def expect(self, place: Place, kill: Callable[[], None]) -> None:
        """From now on, count the calls of a new process, which `kill` kills, up to its place."""
        self._place, self._kill, self.has_killed = place, kill, False
        self._seen.clear()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            content = [request async for request in requests]
            moment = self._moment_of(_name_of(method, content))
            if moment is Moment.LOST:
                await asyncio.gather(*self._open)
                self._strike()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
            given = context.invocation_metadata()
            metadata = tuple((key, value) for key, value in given if key.startswith("x-") or key == "authorization")
            call = self._channel.stream_stream(method)(iter(content), metadata=metadata)
            answered = asyncio.get_running_loop().create_future()
            self._open.add(answered)
            try:
                if moment is Moment.ON_ITS_WAY:
                    self._strike()
                if moment is Moment.ANSWERED:
                    with suppress(grpc.aio.AioRpcError):
                        [reply async for reply in call]
                    self._strike()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
                async for reply in call:
                    yield reply
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()
                self._open.discard(answered)
                answered.set_result(None)

        return grpc.stream_stream_rpc_method_handler(forward)

    def _moment_of(self, name: str) -> Moment | None:
        self._seen[name] += 1
        place = self._place
        return place.moment if place and (place.call, place.number) == (name, self._seen[name]) else None

    def _strike(self) -> None:
        self._kill()
        self._place, self.has_killed = None, True


def _name_of(method: str, requests: list[bytes]) -> str:
    """Name a call, or the command that it sends."""
    name = method.rpartition("/")[2]
    step = pb.OptimStepRequest()
    if name == "Execute":
        execute = pb.ExecuteRequest.FromString(requests[0])
        command = execute.WhichOneof("command")
        name, step = "".join(word.title() for word in command.split("_")), execute.optim_step
    elif name == "OptimStep":
        step = pb.OptimStepRequest.FromString(requests[0])
    return DISCARD if step.HasField("discard_gradient") else name
