"""Pings of clients and servers match: a dead peer is noticed, and neither side refuses the other's as too many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from paceline.rpc.channel import BULK_OPTIONS, CHANNEL_OPTIONS
from paceline.rpc.port_limits import service_options
from paceline.settings import ServiceSettings

SERVER = tuple(service_options(ServiceSettings()))
INTERVAL = "grpc.http2.min_ping_interval_without_data_ms"


def test_grpc_knows_every_option_that_is_set():
    """gRPC ignores options that it does not know."""
    library = Path(cygrpc.__file__).read_bytes()
    names = {name for name, _ in (*SERVER, *CHANNEL_OPTIONS, *BULK_OPTIONS)}
    assert {name for name in names if name.encode() + b"\0" not in library} == set()


def test_clients_ping_less_often_than_servers_take():
    assert dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] >= 2 * dict(SERVER)[INTERVAL]


def test_a_dead_gateway_is_noticed_within_20_seconds():
    client = dict(CHANNEL_OPTIONS)
    for timeout in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert client["grpc.keepalive_time_ms"] + client[timeout] <= 20_000


@pytest.mark.parametrize("calls", [True, False], ids=["a silent call", "no call"])
async def test_a_connection_that_is_silent_and_pinged_stays(calls):
    """Uses a hundredth of the interval and no spare strike, so that the third excess ping would end a connection."""

    async def silent(request, context):
        asked.set()
        await asyncio.Event().wait()
        yield b""

    asked = asyncio.Event()
    handler = grpc.method_handlers_generic_handler("x.X", {"Y": grpc.unary_stream_rpc_method_handler(silent)})
    options = {**dict(SERVER), INTERVAL: dict(SERVER)[INTERVAL] // 100, "grpc.http2.max_ping_strikes": 1}
    server = grpc.aio.server(handlers=[handler], options=tuple(options.items()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    often = {**dict(CHANNEL_OPTIONS), "grpc.keepalive_time_ms": 200}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=tuple(often.items())) as channel:
        call = channel.unary_stream("/x.X/Y")(b"")
        await asked.wait()
        if not calls:
            call.cancel()
        changed = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        done, _ = await asyncio.wait({changed}, timeout=2.0)
        changed.cancel()
        assert not done
        assert call.cancelled() is not calls
    await server.stop(None)
