"""A gRPC proxy that loses requests and replies, and delays, duplicates and reorders requests."""

import asyncio
from random import Random

import grpc
from google.protobuf import descriptor_pool


class UnreliableProxy(grpc.GenericRpcHandler):
    """Forwards calls as bytes, also with streams of replies. While `faulty`, most of them suffer a fault."""

    def __init__(self, upstream: str, seed: int) -> None:
        self.faulty = True
        self.faults = 0
        """Requests that were lost, delayed or answered twice, and answers that were lost."""
        self._upstream = upstream
        self._random = Random(seed)

    async def start(self) -> int:
        """Listen; return the port."""
        self._channel = grpc.aio.insecure_channel(
            self._upstream,
            options=[
                ("grpc.max_reconnect_backoff_ms", 50),
                ("grpc.initial_reconnect_backoff_ms", 20),
                ("grpc.min_reconnect_backoff_ms", 20),
            ],
        )
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details):
        method = handler_call_details.method
        if _has_stream(method):
            return grpc.unary_stream_rpc_method_handler(self._streamed(self._channel.unary_stream(method)))
        call = self._channel.unary_unary(method)

        async def forward(request, context):
            metadata = _passed_on(context)
            try:
                return await self._troubled(lambda: call(request, metadata=metadata, timeout=60), context)
            except grpc.aio.AioRpcError as error:
                await _abort_as(error, context)

        return grpc.unary_unary_rpc_method_handler(forward)

    def _streamed(self, call):
        async def forward(request, context):
            metadata = _passed_on(context)
            fault = await self._arrival(context)
            streams = [call(request, metadata=metadata) for _ in range(2 if fault == "twice" else 1)]
            self.faults += len(streams) - 1
            try:
                async for reply in streams[-1]:
                    if fault == "lose reply" and self._random.random() < 0.5:  # the first, or a later one
                        self.faults += 1
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way back")
                    yield reply
            except grpc.aio.AioRpcError as error:
                await _abort_as(error, context)
            finally:
                for stream in streams:
                    stream.cancel()

        return forward

    async def _arrival(self, context):
        """Draw a call's fault and return it; lose or delay the request if it is that."""
        fault = self._random.choice(("none", "lose request", "lose reply", "twice", "delay")) if self.faulty else "none"
        if fault == "lose request":
            self.faults += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way")
        if fault == "delay":
            self.faults += 1
            await asyncio.sleep(self._random.uniform(0, 0.03))  # later commands overtake this one
        return fault

    async def _troubled(self, send, context):
        fault = await self._arrival(context)
        if fault == "twice":
            first, second = await asyncio.gather(send(), send(), return_exceptions=True)
            self.faults += not isinstance(first, BaseException) and not isinstance(second, BaseException)
            return _reply(second if isinstance(first, BaseException) else first)
        reply = await send()
        if fault == "lose reply":
            self.faults += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way back")
        return reply


def _reply(outcome):
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _has_stream(method):
    service, _, name = method.removeprefix("/").partition("/")
    methods = descriptor_pool.Default().FindServiceByName(service).methods_by_name
    return methods[name].server_streaming


def _passed_on(context):
    given = context.invocation_metadata()
    return tuple((key, value) for key, value in given if key.startswith("x-") or key == "authorization")


async def _abort_as(error, context):
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
