"""A gRPC proxy that loses requests and replies, and delays, duplicates and reorders requests."""

import asyncio
from random import Random

import grpc


class UnreliableProxy(grpc.GenericRpcHandler):
    """Forwards unary calls as bytes. While `faulty`, most of them suffer a fault."""

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
        call = self._channel.unary_unary(handler_call_details.method)

        async def forward(request, context):
            given = context.invocation_metadata()
            metadata = tuple((key, value) for key, value in given if key.startswith("x-") or key == "authorization")
            try:
                return await self._troubled(lambda: call(request, metadata=metadata, timeout=60), context)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))

        return grpc.unary_unary_rpc_method_handler(forward)

    async def _troubled(self, send, context):
        fault = self._random.choice(("none", "lose request", "lose reply", "twice", "delay")) if self.faulty else "none"
        if fault == "lose request":
            self.faults += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way")
        if fault == "delay":
            self.faults += 1
            await asyncio.sleep(self._random.uniform(0, 0.03))  # later commands overtake this one
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
