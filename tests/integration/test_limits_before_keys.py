"""What a peer without a key can hold, and how its calls are counted and answered."""

from __future__ import annotations

import asyncio
import struct

import grpc
import pytest
from prometheus_client import REGISTRY
from support.fuzz.raw_http2 import DATA, Peer, frame
from support.stacks.gateway_stack import stack

from paceline import errors
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.rpc.interceptors import Chain, ErrorInterceptor, MetricsInterceptor
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb

_FORWARD = "/paceline.trainer.v1.TrainerService/ForwardBackward"
_BODY = b"\0" + struct.pack(">I", 20 << 20) + bytes(1000)


async def _peer(up) -> Peer:
    return await Peer.connect(int(up.client.address.rpartition(":")[2]))


async def test_bodies_of_calls_without_a_key_are_not_read(tmp_path):
    async with stack(tmp_path) as up:
        peer = await _peer(up)
        reading = asyncio.create_task(peer.run())
        streams = range(1, 41, 2)
        for stream in streams:
            peer.begin(stream, _FORWARD)
            peer.writer.write(frame(DATA, 0, stream, _BODY))
        await asyncio.wait_for(peer.until(lambda: peer.ended >= set(streams)), 60)
        assert not any(peer.windows.get(stream) for stream in streams)
        peer.writer.close()
        await reading


async def test_a_connection_that_calls_nothing_is_closed(tmp_path):
    async with stack(tmp_path, idle_seconds=0.2) as up:
        peer = await _peer(up)
        await asyncio.wait_for(peer.run(), 60)


async def test_connections_and_calls_on_each_are_limited(tmp_path):
    async with stack(tmp_path, max_connections=4, max_streams=7) as up:
        peers = [await _peer(up) for _ in range(8)]
        reading = [asyncio.create_task(peer.run()) for peer in peers]
        await asyncio.wait_for(peers[0].until(lambda: peers[0].max_streams), 60)
        await asyncio.wait_for(asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED), 60)
        assert {peer.max_streams for peer in peers} <= {0, 7}
        for peer in peers:
            peer.writer.close()
        await asyncio.wait_for(asyncio.gather(*reading), 60)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x01\xff", b"\x13\x00\x14"])
@pytest.mark.parametrize("method", ["gateway.v1.GatewayService/WhoAmI", "gateway.v1.GatewayService/GetCapabilities"])
async def test_a_message_that_cannot_be_read_is_an_error_like_others_and_comes_after_the_key(tmp_path, method, data):
    async with stack(tmp_path) as up:
        call = up.client.channel.unary_unary(f"/paceline.{method}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(data + b"\x07")
        assert isinstance(error_from_rpc(refused.value), errors.InvalidApiKey)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(data + b"\x07", metadata=up.auth)
        assert isinstance(error_from_rpc(refused.value), errors.UnreadableMessage)


async def test_an_error_that_is_slow_to_be_sent_arrives_and_is_no_fault_of_the_server(monkeypatch, caplog):
    monkeypatch.setattr("paceline.rpc.status.ABORT_SECONDS", 0.0)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/x.X/Y")(b"")
        assert isinstance(error_from_rpc(refused.value), errors.Unsupported)
    await server.stop(None)
    assert caplog.records == []


async def test_methods_that_do_not_exist_share_one_label_and_are_unimplemented():
    registry = type(REGISTRY)()
    known = "/paceline.gateway.v1.GatewayService/WhoAmI"
    chain = Chain(MetricsInterceptor(registry, [known]), ErrorInterceptor())
    server = grpc.aio.server(interceptors=[chain])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in (*(f"/x.X/Y{number}" for number in range(50)), known):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(name)(gateway_pb.WhoAmIRequest().SerializeToString())
            assert isinstance(error_from_rpc(refused.value), errors.Unsupported)
    await server.stop(None)
    methods = {sample.labels["method"] for family in registry.collect() for sample in family.samples}
    assert methods == {"other", known}


@pytest.mark.parametrize("text", ["x" * 5000, "ä" * 5000, "%" * 5000])
async def test_an_error_that_echoes_a_long_text_arrives_whole(tmp_path, text):
    async with stack(tmp_path) as up:
        up.trainer.error = errors.UnknownField(text, field=f"data[0].loss_inputs[{text}]", metadata={"name": text})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await up.client.trainer.GetRun(trainer_pb.GetRunRequest(run_id="r"), metadata=up.auth)
        error = error_from_rpc(refused.value)
        assert isinstance(error, errors.UnknownField)
        assert error.message.startswith(text[:200])
