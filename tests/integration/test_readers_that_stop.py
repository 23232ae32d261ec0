"""Readers that stop reading hurt only themselves: others are served, weights are replaced, their calls time out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from support.fuzz.raw_http2 import DATA, END_STREAM, Peer, frame
from support.models.model_versions import RUN, publish_and_check
from support.patience import PATIENCE, standing_still
from support.ports import free_port
from support.stacks.gateway_stack import PART_BYTES, stack
from support.stacks.sampler_stack import base_ref, sampling, stream_request, until, version_ref

from paceline import errors
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.rpc.interceptors import AroundInterceptor, Chain, ErrorInterceptor
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

pytest_plugins = ["support.stacks.sampler_fixtures"]

METHOD = "/paceline.sampler.v1.SamplerService/SampleStream"
LONG = 3600.0
SOON = 0.2
NO_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 5)]
"""Channel options of a client that receives nothing before reading it."""
MOST_UNREAD_BYTES = 8 << 20
"""Most bytes of a download that nobody reads on: those in the gateway, and those on their way."""


class Left(AroundInterceptor):
    """Sets `left` when the call that it wraps has ended."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    @asynccontextmanager
    async def around(self, call):
        try:
            yield
        finally:
            self.left.set()


async def endlessly(request, context) -> AsyncIterator[bytes]:
    while True:
        yield bytes(1 << 16)


@asynccontextmanager
async def answering(stream):
    """Serve one stream; yield a call of it and the event that is set when its handler has ended."""
    left = Left()
    handler = grpc.method_handlers_generic_handler("x.X", {"Y": grpc.unary_stream_rpc_method_handler(stream)})
    server = grpc.aio.server(handlers=[handler], interceptors=[Chain(ErrorInterceptor(), left, reader_seconds=SOON)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_stream("/x.X/Y")(b""), left.left
    await server.stop(None)


async def read_to_the_end(call) -> errors.PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while await call.read() is not grpc.aio.EOF:
            pass
    return error_from_rpc(ended.value)


async def test_a_stream_that_is_not_read_is_freed_in_time_and_its_reader_told_when_it_reads_on():
    async with answering(endlessly) as (call, left):
        await call.read()
        await asyncio.wait_for(left.wait(), PATIENCE)
        error = await read_to_the_end(call)
    assert isinstance(error, errors.ReaderStalled)
    assert "nothing was read for 0.2 s" in error.message


async def test_a_stream_that_has_nothing_to_say_for_long_is_not_the_readers_fault():
    begun, speaks = asyncio.Event(), asyncio.Semaphore(0)

    async def seldom(request, context) -> AsyncIterator[bytes]:
        begun.set()
        for _ in range(2):
            await speaks.acquire()
            yield b"at last"

    async with answering(seldom) as (call, _):
        await asyncio.wait_for(begun.wait(), PATIENCE)
        for _ in range(2):
            async with answering(endlessly) as (stalled, left):  # it began later, and its reader is late already
                await stalled.read()
                await asyncio.wait_for(left.wait(), PATIENCE)
            speaks.release()
            assert await call.read() == b"at last"
        assert await call.read() is grpc.aio.EOF


async def test_a_caller_of_the_gateway_that_stops_reading_frees_the_sampler(tmp_path):
    async with stack(tmp_path, reader_seconds=SOON) as up:
        call = up.client.sampler.SampleStream(pb.SampleStreamRequest(), metadata=up.auth)
        await call.read()
        await asyncio.wait_for(up.sampler.left.wait(), PATIENCE)
        assert isinstance(await read_to_the_end(call), errors.ReaderStalled)


async def test_a_download_that_nobody_reads_on_waits_in_the_trainer_and_not_in_the_gateway(tmp_path):
    async with stack(tmp_path) as up:
        request = trainer_pb.DownloadCheckpointRequest()
        read = up.client.trainer.DownloadCheckpoint(request, metadata=up.auth)
        for _ in range(200):  # by default gRPC would take the gateway's link to the trainer for a fast one by then
            await read.read()
        read.cancel()
        before = await standing_still(lambda: up.trainer.parts, SOON)
        async with grpc.aio.insecure_channel(up.client.address, options=NO_WINDOW) as channel:
            unread = TrainerServiceStub(channel).DownloadCheckpoint(request, metadata=up.auth)
            await unread.read()
            sent = await standing_still(lambda: up.trainer.parts, SOON) - before
            assert sent * PART_BYTES <= MOST_UNREAD_BYTES
            unread.cancel()


async def unread_bytes(up) -> int:
    """Return how many bytes of a tenant's calls the gateway counts."""
    usage = await up.client.gateway.WhoAmI(gateway_pb.WhoAmIRequest(), metadata=up.auth)
    return next(quota.used for quota in usage.quotas if quota.name == "call_bytes")


async def counted(up, holds) -> None:
    """Wait until the bytes that the gateway counts are as they should be."""
    async with asyncio.timeout(PATIENCE):
        while not holds(await unread_bytes(up)):  # noqa: ASYNC110 - any number
            await asyncio.sleep(0)


@asynccontextmanager
async def taking_nothing(up, method, calls):
    """Make calls of a connection that lets the gateway send it no byte of a message."""
    peer = await Peer.connect(int(up.client.address.rsplit(":", 1)[1]), window=0)
    for stream in range(1, 2 * calls, 2):
        peer.begin(stream, method, [(name.encode(), value.encode()) for name, value in up.auth])
        peer.writer.write(frame(DATA, END_STREAM, stream, bytes(5)))
    receiving = asyncio.create_task(peer.run())
    try:
        yield peer
    finally:
        peer.writer.transport.abort()
        await receiving


@pytest.mark.parametrize("method", ["GetTokenizer", "DownloadCheckpoint"])
async def test_answers_that_nobody_reads_count_as_their_tenants_until_the_caller_has_gone(tmp_path, method):
    limit = 3 * PART_BYTES + PART_BYTES // 2
    async with stack(tmp_path, max_bytes_in_flight_per_tenant=limit, reader_seconds=SOON) as up:
        async with taking_nothing(up, f"/paceline.trainer.v1.TrainerService/{method}", calls=6) as peer:
            await counted(up, lambda used: 3 * PART_BYTES <= used <= limit)
            await asyncio.wait_for(peer.until(lambda: len(peer.ended) == 3), PATIENCE)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await up.client.trainer.GetTokenizer(trainer_pb.GetTokenizerRequest(), metadata=up.auth)
            error = error_from_rpc(refused.value)
            assert isinstance(error, errors.QuotaExceeded)
            assert (error.metadata["quota"], error.retry_after) == ("call_bytes", 1.0)
            await up.client.trainer.GetTokenizer(trainer_pb.GetTokenizerRequest(), metadata=up.other_auth)
        await counted(up, lambda used: not used)
        await up.client.trainer.GetTokenizer(trainer_pb.GetTokenizerRequest(), metadata=up.auth)


@asynccontextmanager
async def posting(folder, path, body, **settings):
    """Run a gateway with an HTTP port and closed gate, and post to it; yield the stack and the caller's connection."""
    http = {"http_listen": f"127.0.0.1:{free_port()}", "http_state": folder / "http"}
    async with stack(folder, **http, **settings) as up:
        up.sampler.gate.clear()
        up.sampler.reached[1] = asyncio.Event()
        reader, writer = await asyncio.open_connection(*http["http_listen"].split(":"))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {up.key}\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        try:
            await asyncio.wait_for(up.sampler.reached[1].wait(), PATIENCE)
            yield up, reader, writer
        finally:
            writer.close()


async def test_a_caller_of_the_http_port_that_stops_reading_frees_its_place(tmp_path):
    body, settings = {"model": "tiny", "prompt": "x", "stream": True}, {"reader_seconds": SOON, "max_in_flight": 1}
    async with posting(tmp_path, "/v1/completions", body, **settings) as (up, reader, _):
        up.sampler.gate.set()
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(up.sampler.left.wait(), PATIENCE)
        await up.client.trainer.GetRun(trainer_pb.GetRunRequest(), metadata=up.auth, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/completions", {"stream": True}), ("/generate", {"prompt_logprobs": 1})]
)
async def test_a_caller_of_the_http_port_that_leaves_before_it_is_answered_frees_the_sampler(tmp_path, path, more):
    async with posting(tmp_path, path, {"model": "tiny", "prompt": "x", **more}) as (up, _, writer):
        writer.close()
        await asyncio.wait_for(up.sampler.left.wait(), PATIENCE)


@asynccontextmanager
async def unread(client, ref=None, **fields):
    """Start a stream and yield its call without reading from it."""
    async with grpc.aio.insecure_channel(client.address, options=NO_WINDOW) as channel:
        request = stream_request(ref or base_ref(), **fields)
        call = SamplerServiceStub(channel).SampleStream(request, metadata=client.metadata)
        await call.initial_metadata()
        yield call


async def test_completions_that_nobody_reads_free_their_places_for_others_when_they_are_sampled(model, port, tmp_path):
    async with (
        sampling(model, port, tmp_path, max_num_seqs=2, reader_seconds=LONG) as client,
        unread(client, num_samples=8) as call,
    ):
        answer = await client.sample(base_ref())
        assert len(answer.sequences) == 1
        assert client.engine.num_running() == 0
        assert sum([len(message.tokens) async for message in call]) == 32


async def test_a_reader_that_leaves_too_many_tokens_unread_has_its_call_ended(model, port, tmp_path):
    async with (
        sampling(model, port, tmp_path, max_unread_tokens=8, reader_seconds=LONG) as client,
        unread(client, max_tokens=200) as call,
    ):
        await until(lambda: not client.engine.num_running())
        error = await read_to_the_end(call)
        assert isinstance(error, errors.ReaderStalled)
        assert "more than 8 tokens" in error.message
        assert len((await client.sample(base_ref(), max_tokens=100)).sequences) == 1


@pytest.mark.parametrize("engine", ["hf", "vllm"])
async def test_a_whole_model_is_exchanged_although_somebody_stopped_reading(
    engine, model, volume, trainer, port, tmp_path, vllm_here
):
    how = {"hf": {"bridge": "restart"}, "vllm": {"serves": "models", "engine": "vllm"}}[engine]
    async with sampling(model, port, tmp_path, reader_seconds=LONG, **how) as client, unread(client) as call:
        await publish_and_check(volume, trainer, client, 1)
        async with unread(client, version_ref(RUN, 1)):
            await publish_and_check(volume, trainer, client, 2)
        assert {message.model.version async for message in call} == {0}


async def test_an_answer_of_openais_api_that_nobody_reads_is_in_nobodys_way(
    model, volume, trainer, port, tmp_path, vllm_here
):
    how = {"serves": "models", "engine": "vllm", "max_num_seqs": 1, "reader_seconds": LONG}
    body = b'{"prompt": [[1, 2], [3]], "max_tokens": 48, "ignore_eos": true, "stream": true}'
    request = pb.CompleteTextRequest(model=base_ref(), endpoint=pb.TEXT_ENDPOINT_COMPLETIONS, body=body)
    async with (
        sampling(model, port, tmp_path, **how) as client,
        grpc.aio.insecure_channel(client.address, options=NO_WINDOW) as channel,
    ):
        call = SamplerServiceStub(channel).CompleteText(request, metadata=client.metadata)
        await call.initial_metadata()
        assert len((await client.sample(base_ref())).sequences) == 1
        await publish_and_check(volume, trainer, client, 1)
        events = [json.loads(message.data) async for message in call]
    ends = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert ends == ["length"] * 2


async def test_a_whole_model_is_exchanged_although_a_peer_never_lets_a_byte_through(
    model, volume, trainer, port, tmp_path
):
    how = {"bridge": "restart", "reader_seconds": SOON, "max_unread_tokens": 1 << 20}
    async with sampling(model, port, tmp_path, **how) as client:
        peer = await Peer.connect(client.address.removeprefix("unix:"), window=0)
        reading = asyncio.create_task(peer.run())
        request = stream_request(base_ref(), num_samples=64, max_tokens=200).SerializeToString()
        metadata = [(name.encode(), value.encode()) for name, value in client.metadata]
        peer.begin(1, METHOD, metadata)
        peer.writer.write(frame(DATA, 1, 1, b"\0" + len(request).to_bytes(4, "big") + request))
        await until(client.engine.num_running)
        await publish_and_check(volume, trainer, client, 1)
        peer.writer.close()
        await reading
