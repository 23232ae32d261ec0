"""The proxy alone: bytes of every kind of call, unknown methods, and the choice of a sampler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from structlog.testing import capture_logs
from support.patience import PATIENCE
from support.ports import free_port
from support.stacks.gateway_stack import CREDENTIAL, Sampler, bearer, gateway, serving

from gateway.proxy import Proxy, Router, Upstream
from gateway.tenants import Tenants
from paceline import errors
from paceline.files.key_changes import add_key
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.interceptors import CredentialInterceptor
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb

_MESSAGES = [b"", b"\x00", os.urandom(3), os.urandom(1 << 16), b"", os.urandom(3 << 20)]
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Echo(grpc.GenericRpcHandler):
    """A service that is in no contract; each method is named after its kind."""

    async def unary(self, request, context):
        return request[::-1]

    async def server_stream(self, request, context):
        for end in range(0, len(request) + 1, max(1, len(request) // 4)):
            yield request[:end]

    async def client_stream(self, requests, context):
        return b"|".join([request async for request in requests])

    async def both(self, requests, context):
        async for request in requests:
            yield request[::-1]

    def service(self, handler_call_details):
        return {
            "/paceline.trainer.v1.Echo/Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "/paceline.trainer.v1.Echo/ServerStream": grpc.unary_stream_rpc_method_handler(self.server_stream),
            "/paceline.trainer.v1.Echo/ClientStream": grpc.stream_unary_rpc_method_handler(self.client_stream),
            "/paceline.trainer.v1.Echo/Both": grpc.stream_stream_rpc_method_handler(self.both),
        }.get(handler_call_details.method)


@asynccontextmanager
async def _serve(handler, *interceptors) -> AsyncIterator[str]:
    server = grpc.aio.server(handlers=[handler], interceptors=interceptors, options=_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a proxy in front of `Echo`."""
    async with _serve(Echo()) as target:
        upstream = Upstream("trainer", target, None)
        proxy = Proxy(Router(upstream, [], 0), Tenants(), WaitingBytes())
        async with (
            _serve(proxy, CredentialInterceptor("")) as address,
            grpc.aio.insecure_channel(address, options=_OPTIONS) as opened,
        ):
            yield opened
        await upstream.close()


@pytest.mark.parametrize("message", _MESSAGES, ids=len)
async def test_a_unary_call_of_an_unknown_method_passes_byte_for_byte(channel, message):
    assert await channel.unary_unary("/paceline.trainer.v1.Echo/Unary")(message) == message[::-1]


@pytest.mark.parametrize("message", _MESSAGES, ids=len)
async def test_a_response_stream_passes_byte_for_byte(channel, message):
    replies = [reply async for reply in channel.unary_stream("/paceline.trainer.v1.Echo/ServerStream")(message)]
    assert replies == [reply async for reply in Echo().server_stream(message, None)]


async def test_a_request_stream_passes_byte_for_byte(channel):
    method = channel.stream_unary("/paceline.trainer.v1.Echo/ClientStream")
    assert await method(iter(_MESSAGES)) == b"|".join(_MESSAGES)
    assert await method(iter([])) == b""


async def test_messages_of_both_sides_pass_one_by_one(channel):
    call = channel.stream_stream("/paceline.trainer.v1.Echo/Both")()
    for message in _MESSAGES:
        await call.write(message)
        assert await asyncio.wait_for(call.read(), PATIENCE) == message[::-1]
    await call.done_writing()
    assert await asyncio.wait_for(call.read(), PATIENCE) is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "method", ["/paceline.trainer.v1.TrainerService/GetRun", "/paceline.weights.v1.WeightService/FetchVersion"]
)
async def test_a_method_that_the_service_lacks_is_unimplemented(channel, method):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_stream(method)(b"").read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def _metadata(tmp_path, route: str = "run-1@3"):
    return (bearer(add_key(tmp_path / "keys.json", "team-a", "laptop")), ("x-paceline-route", route))


async def _served_by(client, metadata) -> str:
    reply = await client.sampler.Sample(sampler_pb.SampleRequest(), metadata=metadata, timeout=PATIENCE)
    return reply.model.base_model


async def test_a_call_that_samples_nothing_says_nothing_about_who_holds_a_version(tmp_path):
    metadata = _metadata(tmp_path)
    first, second = Sampler("first"), Sampler("second")
    async with (
        serving(first) as one,
        serving(second) as two,
        gateway(one, [one, two], tmp_path / "keys.json") as client,
    ):
        about = await client.sampler.GetServerInfo(sampler_pb.GetServerInfoRequest(), metadata=metadata)
        busy, other = (first, second) if about.sampler_id == "first" else (second, first)
        busy.gate.clear()
        busy.reached[1] = asyncio.Event()
        waiting = asyncio.create_task(_served_by(client, metadata[:1]))
        await asyncio.wait_for(busy.reached[1].wait(), PATIENCE)
        assert await _served_by(client, metadata) == other.name
        busy.gate.set()
        await waiting


async def test_a_version_stays_with_the_sampler_that_holds_it_until_that_one_is_busier_by_the_margin(tmp_path):
    metadata = _metadata(tmp_path)
    first, second = Sampler("first"), Sampler("second")
    async with (
        serving(first) as one,
        serving(second) as two,
        gateway(one, [one, two], tmp_path / "keys.json", spill_in_flight=2) as client,
    ):
        names = {await _served_by(client, metadata) for _ in range(6)}
        assert len(names) == 1
        holder, other = (first, second) if names == {"first"} else (second, first)
        holder.gate.clear()
        other.gate.clear()
        other.reached[1], holder.reached[2] = asyncio.Event(), asyncio.Event()
        calls = [asyncio.create_task(_served_by(client, metadata)) for _ in range(4)]
        for reached in (other.reached[1], holder.reached[2]):
            await asyncio.wait_for(reached.wait(), PATIENCE)
        holder.gate.set()
        other.gate.set()
        assert set(await asyncio.gather(*calls)) == {"first", "second"}
        assert holder.most_running >= 2


async def test_calls_without_a_version_go_where_fewest_are(tmp_path):
    metadata = _metadata(tmp_path)[:1]
    first, second = Sampler("first"), Sampler("second")
    for sampler in (first, second):
        sampler.gate.clear()
        sampler.reached[3] = asyncio.Event()
    async with (
        serving(first) as one,
        serving(second) as two,
        gateway(one, [one, two], tmp_path / "keys.json") as client,
    ):
        calls = [asyncio.create_task(_served_by(client, metadata)) for _ in range(6)]
        await asyncio.wait_for(asyncio.gather(*(sampler.reached[3].wait() for sampler in (first, second))), PATIENCE)
        first.gate.set()
        second.gate.set()
        assert sorted(await asyncio.gather(*calls)) == ["first"] * 3 + ["second"] * 3


async def test_a_sampler_that_is_down_is_passed_over_and_taken_again_when_it_is_back(tmp_path):
    metadata = _metadata(tmp_path)
    async with serving(Sampler("stays")) as stays:
        async with serving(Sampler("goes")) as goes:
            pass
        async with gateway(stays, [goes, stays], tmp_path / "keys.json", spill_in_flight=0) as client:
            assert {await _served_by(client, metadata) for _ in range(10)} == {"stays"}
            async with serving(Sampler("goes"), port=goes):
                await asyncio.wait_for(_until_served_by("goes", client, metadata), PATIENCE)
            assert {await _served_by(client, metadata) for _ in range(10)} == {"stays"}


async def test_a_sampler_whose_engine_is_dead_is_passed_over_and_taken_again_when_it_is_back(tmp_path):
    metadata = _metadata(tmp_path)[:1]
    lives, dies = Sampler("lives"), Sampler("dies")
    async with (
        serving(lives) as one,
        serving(dies) as two,
        gateway(one, [two, one], tmp_path / "keys.json") as client,
    ):
        assert await _served_by(client, metadata) == "dies"  # the first of two that are idle
        dies.error, dies.refusal = errors.EngineUnavailable("the engine died"), "the engine died"
        lives.gate.clear()  # it has calls in flight from now on, and the other one has none
        lives.reached[3] = asyncio.Event()
        for _ in range(1000):  # far fewer fail until the gateway has asked; without that, many more
            first = asyncio.create_task(_served_by(client, metadata))
            while not (first.done() or lives.running):
                await asyncio.wait({first}, timeout=0.01)
            if lives.running:
                break
            assert isinstance(first.exception(), grpc.aio.AioRpcError)
        else:
            pytest.fail("the sampler whose engine is dead gets all calls")
        calls = [first]
        calls += [asyncio.create_task(_served_by(client, metadata)) for _ in range(2)]
        await asyncio.wait_for(lives.reached[3].wait(), PATIENCE)
        lives.gate.set()
        assert await asyncio.gather(*calls) == ["lives"] * 3
        dies.error, dies.refusal = None, ""
        await asyncio.wait_for(_until_served_by("dies", client, metadata), PATIENCE)


async def _until_served_by(name, client, metadata) -> None:
    # A recovered sampler has fewer calls in flight, so it gets the next of several overlapping calls.
    while name not in await asyncio.gather(*(_served_by(client, metadata) for _ in range(4))):
        pass


async def test_services_refuse_calls_past_the_gateway(tmp_path):
    async with serving(Sampler()) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_unary("/paceline.sampler.v1.SamplerService/Sample")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", metadata=(("x-paceline-tenant", "team-a"), ("x-paceline-credential", "guess")))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert CREDENTIAL not in str(caught.value)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_service_that_is_not_up_yet_is_no_warning_unless_it_takes_long(monkeypatch, is_late):
    if is_late:
        monkeypatch.setattr("gateway.proxy.START_SECONDS", 0.0)
    port = free_port()
    upstream = Upstream("trainer", f"127.0.0.1:{port}", None)
    with capture_logs() as logged:
        upstream.connect()
        await asyncio.wait_for(upstream.settled.wait(), PATIENCE)
        server = grpc.aio.server()
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await upstream.wait_until_ready(PATIENCE)
        await server.stop(None)
        async with asyncio.timeout(PATIENCE):
            while len(logged) < 3:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.02)
    await upstream.close()
    first = ("warning", "upstream is down") if is_late else ("info", "waiting for upstream")
    said = [(line["log_level"], line["event"]) for line in logged]
    assert said == [first, ("info", "upstream is up"), ("warning", "upstream is down")]
