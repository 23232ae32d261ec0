"""Errors of failed calls, as a client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from paceline import errors
from paceline.client.retry import is_retryable
from paceline.rpc.status import error_from_rpc


class _NeverAnswered(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    def service(self, _: grpc.HandlerCallDetails):
        async def wait(request, context):
            self.arrived.set()
            await asyncio.Event().wait()

        return grpc.unary_unary_rpc_method_handler(wait)


@asynccontextmanager
async def _serving(
    *options: tuple[str, int],
) -> AsyncIterator[tuple[_NeverAnswered, grpc.aio.Server, grpc.aio.Channel]]:
    handler = _NeverAnswered()
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield handler, server, channel
    await server.stop(0)


async def test_a_call_that_a_stopping_server_ends_may_be_repeated():
    async with _serving() as (handler, server, channel):
        calls = [asyncio.ensure_future(_call(channel)) for _ in range(20)]
        await handler.arrived.wait()
        await server.stop(0)
        failures = await asyncio.gather(*calls, return_exceptions=True)
    assert grpc.StatusCode.CANCELLED in {failure.code() for failure in failures}, "or there is nothing to test"
    for failure in failures:
        error = error_from_rpc(failure)
        assert isinstance(error, errors.UpstreamUnavailable)
        assert is_retryable(error)


_FEW_WAIT = (("grpc.server.max_pending_requests", 8), ("grpc.server.max_pending_requests_hard_limit", 8))


async def test_calls_that_are_dropped_because_too_many_wait_may_be_repeated():
    async with _serving(*_FEW_WAIT) as (_, server, channel):
        calls = [asyncio.ensure_future(_call(channel)) for _ in range(500)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = [call.exception() for call in calls if call.done()]
        await server.stop(0)
        await asyncio.gather(*calls, return_exceptions=True)
    assert refused
    assert all(is_retryable(error_from_rpc(failure)) for failure in refused)


async def test_a_message_that_is_too_large_for_grpc_is_not_repeated():
    async with _serving(("grpc.max_receive_message_length", 10)) as (_, _, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/a/b")(bytes(100))
    error = error_from_rpc(refused.value)
    assert isinstance(error, errors.MessageTooLarge)
    assert not is_retryable(error)


async def test_a_caller_that_cancels_gets_no_status():
    async with _serving() as (handler, _, channel):
        call = channel.unary_unary("/a/b")(b"")
        await handler.arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def _call(channel: grpc.aio.Channel) -> bytes:
    return await channel.unary_unary("/a/b")(b"")
