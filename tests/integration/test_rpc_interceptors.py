"""Interceptors around response streams exit in the task that entered them, however the call ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from structlog.testing import capture_logs
from support.patience import PATIENCE, standing_still

from paceline.rpc.interceptors import AroundInterceptor, Chain, ErrorInterceptor, LoggingInterceptor


class Note(AroundInterceptor):
    """Records the tasks in which a call starts and ends."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task | None] = []
        self.left = asyncio.Event()

    @asynccontextmanager
    async def around(self, call):
        self.tasks.append(asyncio.current_task())
        try:
            yield
        finally:
            self.tasks.append(asyncio.current_task())
            self.left.set()


class Endless(grpc.GenericRpcHandler):
    """Yields messages until it is stopped, and counts them: the count stops when a message waits to be sent."""

    def __init__(self) -> None:
        self.sent = 0

    async def stream(self, request, context) -> AsyncIterator[bytes]:
        while True:
            self.sent += 1
            yield bytes(1 << 20)

    def service(self, handler_call_details):
        return grpc.unary_stream_rpc_method_handler(self.stream)


@pytest.mark.parametrize("chained", [True, False])
async def test_a_call_that_is_cancelled_while_a_message_waits_to_be_sent_ends_in_its_own_task(chained, caplog):
    note, endless = Note(), Endless()
    interceptors = [LoggingInterceptor(), ErrorInterceptor(), note]
    server = grpc.aio.server(handlers=[endless], interceptors=[Chain(*interceptors)] if chained else interceptors)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with capture_logs() as logs, caplog.at_level(logging.WARNING):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/x.X/Y")(b"")
            await call.read()
            await standing_still(lambda: endless.sent)
            call.cancel()
            await asyncio.wait_for(note.left.wait(), PATIENCE)
        await server.stop(None)
    assert note.tasks[0] is note.tasks[1]
    assert [(log["event"], log["code"]) for log in logs] == [("call", "CANCELLED")]
    assert not caplog.records
