"""The gateway between a client and real services: authentication, tenants, limits, and how errors arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic

import grpc
import httpx
import pytest
from structlog.testing import capture_logs
from support.patience import PATIENCE, standing_still
from support.stacks.gateway_stack import CREDENTIAL, Sampler, Stack, Trainer, bearer, free_port, gateway, serving, stack

from gateway.admission import ACCESS, Access
from paceline import errors
from paceline.client.service_client import MAX_IN_FLIGHT
from paceline.files.key_changes import add_key, expire_key, remove_key
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.rpc.channel import open_channel
from paceline.rpc.port_limits import UNREAD_SECONDS
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types.v1 import tensor_pb2

_GET_RUN = trainer_pb.GetRunRequest(run_id="run-1")


@pytest.fixture
async def up(tmp_path) -> AsyncIterator[Stack]:
    async with stack(tmp_path) as running:
        yield running


async def failure(call) -> errors.PacelineError:
    """Return the typed error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def call_raw(up: Stack, method: str, metadata) -> None:
    """Call a method of any kind with one empty message."""
    call = up.client.channel.unary_stream(method)(b"", metadata=metadata, timeout=PATIENCE)
    async for _ in call:
        call.cancel()


async def test_a_call_reaches_the_service_as_the_keys_tenant(up):
    reply = await up.client.trainer.GetRun(_GET_RUN, metadata=up.auth)
    assert (reply.run.run_id, reply.run.base_model) == ("run-1", "team-a")
    assert (await up.client.trainer.GetRun(_GET_RUN, metadata=up.other_auth)).run.base_model == "team-b"


async def test_who_am_i(up):
    reply = await up.client.gateway.WhoAmI(pb.WhoAmIRequest(), metadata=up.auth)
    assert (reply.tenant, reply.key_name) == ("team-a", "laptop")
    assert [(quota.name, quota.used, quota.limit) for quota in reply.quotas] == [
        ("calls", 1, 1024),
        ("call_bytes", 0, 1 << 30),
        ("runs", 6, 64),
        ("versions", 1, 16),
    ]


async def test_bytes_of_calls_that_are_passed_on_are_bounded_by_tenant(tmp_path):
    prompt = tensor_pb2.Tensor(data=bytes(6000))
    async with stack(tmp_path, max_bytes_in_flight_per_tenant=10_000, max_bytes_in_flight=15_000) as up:
        up.sampler.gate.clear()
        up.sampler.reached = {1: asyncio.Event(), 2: asyncio.Event()}
        request = sampler_pb.SampleRequest(prompt=prompt)
        calls = [asyncio.ensure_future(up.client.sampler.Sample(request, metadata=up.auth))]
        await up.sampler.reached[1].wait()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await up.client.sampler.Sample(request, metadata=up.auth)
        refused = error_from_rpc(failure.value)
        assert isinstance(refused, errors.QuotaExceeded)
        assert (refused.metadata["quota"], refused.metadata["limit"]) == ("call_bytes", "10000")
        assert refused.retry_after
        calls.append(asyncio.ensure_future(up.client.sampler.Sample(request, metadata=up.other_auth)))
        await up.sampler.reached[2].wait()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await up.client.sampler.Sample(
                sampler_pb.SampleRequest(prompt=tensor_pb2.Tensor(data=bytes(3500))), metadata=up.auth
            )
        assert isinstance(error_from_rpc(failure.value), errors.Overloaded)
        up.sampler.gate.set()
        await asyncio.gather(*calls)
        await up.client.sampler.Sample(request, metadata=up.auth)


@pytest.mark.parametrize("method", [*ACCESS, "/paceline.trainer.v1.TrainerService/Unheard", "/paceline.x.v1.X/Y"])
@pytest.mark.parametrize("metadata", [(), (bearer("pl-wrong"),), (("authorization", "Basic eDp5"),)])
async def test_no_method_of_any_kind_answers_without_a_key(up, method, metadata):
    assert isinstance(await failure(call_raw(up, method, metadata)), errors.InvalidApiKey)


@pytest.mark.parametrize(
    "method",
    [
        *(method for method, access in ACCESS.items() if access is Access.NOBODY),
        "/paceline.trainer.v1.TrainerService/Unheard",
        "/paceline.gateway.v1.GatewayService/Unheard",
        "/paceline.x.v1.X/Y",
    ],
)
async def test_closed_and_unlisted_methods_answer_nobody(up, method):
    assert isinstance(await failure(call_raw(up, method, up.auth)), errors.MethodNotAllowed)


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
async def test_reflection_describes_the_services_to_holders_of_a_key(up, package):
    method = up.client.channel.stream_stream(f"/{package}.ServerReflection/ServerReflectionInfo")
    names = [b"paceline.trainer.v1.TrainerService", b"paceline.sampler.v1.SamplerService"]
    asked = [b":\x00", *(b'"' + bytes([len(name)]) + name for name in names)]  # list_services, file_containing_symbol
    listed, *files = [answer async for answer in method(iter(asked), metadata=up.auth)]
    assert all(name in listed for name in names)
    for file, rpc in zip(files, (b"ForwardBackward", b"SampleStream"), strict=True):
        assert rpc in file
    too_long = method(iter([b'"\xff\x3f' + bytes(0x1FFF)]), metadata=up.auth)
    assert isinstance(await failure(too_long.read()), errors.PacelineError)


async def test_a_caller_cannot_name_its_tenant_or_show_a_credential(up):
    forged = (("x-paceline-tenant", "team-b"), ("x-paceline-tenant", ""), ("x-paceline-credential", CREDENTIAL))
    reply = await up.client.trainer.GetRun(_GET_RUN, metadata=(*forged, *up.auth))
    assert reply.run.base_model == "team-a"
    assert isinstance(await failure(up.client.trainer.GetRun(_GET_RUN, metadata=forged)), errors.InvalidApiKey)


async def test_metadata_goes_along_and_the_key_stays_behind(up):
    sent = (("traceparent", "00-aa-bb-01"), ("x-request-id", "req-1"), ("x-app", "demo"), ("x-app-bin", b"\x00\xff"))
    await up.client.trainer.GetRun(_GET_RUN, metadata=(*sent, *up.auth))
    assert dict(sent).items() <= up.trainer.metadata.items()
    assert "authorization" not in up.trainer.metadata


async def test_trailing_metadata_of_an_answer_comes_back(up):
    call = up.client.trainer.GetRun(_GET_RUN, metadata=up.auth)
    await call
    assert dict(await call.trailing_metadata())["x-note"] == "kept"


@pytest.mark.parametrize(
    "error",
    [
        errors.RunNotFound("no such run", field="run_id"),
        errors.RunStateLost("the weights were lost; load it", metadata={"checkpoint": "paceline://run-1/state/a"}),
        errors.EngineUnavailable("the engine is starting", retry_after=2.5),
        errors.Cancelled("the run was deleted"),
    ],
    ids=lambda error: error.reason,
)
async def test_an_error_of_a_service_arrives_as_it_was_raised(up, error):
    up.trainer.error = error
    received = await failure(up.client.trainer.GetRun(_GET_RUN, metadata=up.auth))
    assert type(received) is type(error)
    assert (received.message, received.field) == (error.message, error.field)
    assert (received.metadata, received.retry_after) == (error.metadata, error.retry_after)


async def test_an_error_of_a_stream_arrives_as_it_was_raised(up):
    up.sampler.error = errors.VersionNotFound("no such version", field="model.version")
    for _ in range(20):
        call = up.client.sampler.SampleStream(sampler_pb.SampleStreamRequest(), metadata=up.auth)
        received = await failure(call.read())
        assert (type(received), received.field) == (errors.VersionNotFound, "model.version")


async def test_the_deadline_goes_along(up):
    await up.client.trainer.GetRun(_GET_RUN, metadata=up.auth, timeout=40)
    assert 0 < up.trainer.remaining < 60
    await up.client.trainer.GetRun(_GET_RUN, metadata=up.auth)
    assert up.trainer.remaining is None


async def test_a_deadline_that_passes_ends_the_call_in_the_service(up):
    call = up.client.trainer.ListRuns(trainer_pb.ListRunsRequest(), metadata=up.auth, timeout=0.5)
    assert isinstance(await failure(call), errors.TimedOut)
    await asyncio.wait_for(up.trainer.left.wait(), PATIENCE)


async def test_cancelling_ends_the_call_in_the_service(up):
    call = up.client.trainer.ListRuns(trainer_pb.ListRunsRequest(), metadata=up.auth)
    await asyncio.wait_for(up.trainer.entered.wait(), PATIENCE)
    call.cancel()
    await asyncio.wait_for(up.trainer.left.wait(), PATIENCE)


@pytest.mark.parametrize("messages", [1, 50])
async def test_leaving_a_stream_early_ends_it_in_the_service(up, messages, caplog):
    call = up.client.sampler.SampleStream(sampler_pb.SampleStreamRequest(), metadata=up.auth)
    for _ in range(messages):
        await call.read()
    call.cancel()
    await asyncio.wait_for(up.sampler.left.wait(), PATIENCE)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_reader_that_stops_holds_back_the_service_and_can_still_leave(up):
    call = up.client.sampler.SampleStream(sampler_pb.SampleStreamRequest(), metadata=up.auth)
    await call.read()
    # Read no more: buffers fill until the service's write blocks, so the cancellation arrives while it is blocked.
    await standing_still(lambda: up.sampler.sent)
    with capture_logs() as logs:
        call.cancel()
        await asyncio.wait_for(up.sampler.left.wait(), PATIENCE)
    assert "uncaught" not in [log["event"] for log in logs]


async def test_five_thousand_calls_of_clients_that_bound_their_calls_all_succeed(up):
    up.sampler.gate.clear()
    full = up.sampler.reached[1024] = asyncio.Event()
    request = sampler_pb.SampleRequest()
    async with AsyncExitStack() as resources:
        channels = [await resources.enter_async_context(open_channel(up.client.address)) for _ in range(5)]

        async def sample(channel: grpc.aio.Channel, places: asyncio.Semaphore) -> sampler_pb.SampleResponse:
            async with places:
                while True:
                    sent = monotonic()
                    try:
                        return await SamplerServiceStub(channel).Sample(request, metadata=up.auth)
                    except grpc.aio.AioRpcError as failure:
                        # This process is client, gateway and sampler. On a busy machine it takes calls late.
                        if failure.code() is not grpc.StatusCode.CANCELLED or monotonic() - sent < UNREAD_SECONDS:
                            raise

        calls = [
            asyncio.ensure_future(sample(channel, places))
            for channel, places in ((channel, asyncio.Semaphore(MAX_IN_FLIGHT)) for channel in channels)
            for _ in range(1000)
        ]
        await asyncio.wait_for(full.wait(), PATIENCE)
        up.sampler.gate.set()
        replies = await asyncio.gather(*calls)
    assert {reply.model.base_model for reply in replies} == {"sampler"}
    assert up.sampler.most_running == 1024


async def test_a_tenant_over_its_limits_is_told_when_to_come_back_and_others_pass(tmp_path):
    async with stack(tmp_path, max_in_flight_per_tenant=1, max_queued_per_tenant=0) as up:
        up.trainer.entered.clear()
        blocked = up.client.trainer.ListRuns(trainer_pb.ListRunsRequest(), metadata=up.auth)
        await asyncio.wait_for(up.trainer.entered.wait(), PATIENCE)
        refused = await failure(up.client.trainer.GetRun(_GET_RUN, metadata=up.auth))
        assert isinstance(refused, errors.Overloaded)
        assert refused.retry_after
        await up.client.trainer.GetRun(_GET_RUN, metadata=up.other_auth)
        blocked.cancel()


async def test_a_message_of_32_mib_passes_and_a_larger_one_is_refused_by_name(up):
    def request(size: int) -> trainer_pb.ForwardBackwardRequest:
        request = trainer_pb.ForwardBackwardRequest(run_id="run-1")
        request.data.add().loss_inputs["x"].CopyFrom(tensor_pb2.Tensor(data=bytes(size)))
        return request

    overhead = request(32 << 20).ByteSize() - (32 << 20)
    largest = request((32 << 20) - overhead)
    reply = await up.client.trainer.ForwardBackward(largest, metadata=up.auth)
    assert reply.metrics["bytes:sum"] == 32 << 20
    too_large = up.client.trainer.ForwardBackward(request(33 << 20), metadata=up.auth)
    assert isinstance(await failure(too_large), errors.MessageTooLarge)


async def test_a_new_key_works_and_a_removed_one_stops_without_a_restart(up):
    key = add_key(up.keys_file, "team-c", "new")
    reply = await up.client.trainer.GetRun(_GET_RUN, metadata=(bearer(key),))
    assert reply.run.base_model == "team-c"
    remove_key(up.keys_file, "laptop")
    assert isinstance(await failure(up.client.trainer.GetRun(_GET_RUN, metadata=up.auth)), errors.InvalidApiKey)


ends_a_key = pytest.mark.parametrize(
    "end", [remove_key, partial(expire_key, after=timedelta())], ids=["removed", "expired"]
)


@ends_a_key
async def test_a_stream_in_progress_ends_with_its_key(up, end):
    stream = up.client.sampler.SampleStream(sampler_pb.SampleStreamRequest(), metadata=up.auth)
    other = up.client.sampler.SampleStream(sampler_pb.SampleStreamRequest(), metadata=up.other_auth)
    assert await stream.read()
    assert await other.read()
    end(up.keys_file, "laptop")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(PATIENCE):
            while await stream.read():
                pass
    assert isinstance(error_from_rpc(caught.value), errors.InvalidApiKey)
    assert await other.read()
    other.cancel()


@ends_a_key
async def test_a_stream_over_http_ends_with_its_key(tmp_path, end):
    http, body = f"127.0.0.1:{free_port()}", {"model": "tiny", "prompt": "x", "stream": True}
    async with (
        stack(tmp_path, http_listen=http, http_state=tmp_path / "http") as up,
        httpx.AsyncClient(base_url=f"http://{http}", headers=dict(up.auth), timeout=PATIENCE) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        end(up.keys_file, "laptop")
        tail = b""
        async for part in answer.aiter_raw():
            tail = (tail + part)[-4096:]
        assert json.loads(tail.rpartition(b"data: ")[2])["error"]["code"] == "invalid_api_key"
        await asyncio.wait_for(up.sampler.left.wait(), PATIENCE)


async def test_an_expired_key_is_told_when_it_expired(up):
    expire_key(up.keys_file, "laptop", timedelta())
    refused = await failure(up.client.trainer.GetRun(_GET_RUN, metadata=up.auth))
    assert isinstance(refused, errors.ApiKeyExpired)
    assert refused.metadata["expired"] in refused.message


async def test_a_service_that_dies_is_unavailable_until_it_is_back(tmp_path):
    auth = (bearer(add_key(tmp_path / "keys.json", "team-a", "laptop")),)
    port = free_port()
    async with gateway(port, [free_port()], tmp_path / "keys.json") as client:
        for _ in range(2):
            async with serving(Trainer(), port=port):
                assert (await _once_up(lambda: client.trainer.GetRun(_GET_RUN, metadata=auth))).run.run_id == "run-1"
            down = await failure(client.trainer.GetRun(_GET_RUN, metadata=auth))
            assert isinstance(down, errors.UpstreamUnavailable)
            assert down.retry_after
            assert "trainer" in down.message


async def _once_up(call):
    """Repeat a call while the service is unreachable, as clients do."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as problem:
                error = error_from_rpc(problem)
                assert isinstance(error, errors.UpstreamUnavailable)
                await asyncio.sleep(error.retry_after / 20)


async def test_capabilities_are_those_of_the_services_that_are_up(up):
    reply = await up.client.gateway.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=up.auth)
    model = reply.models[0]
    assert (len(reply.models), model.model.name, model.trainable, model.sampleable) == (1, "tiny", True, True)
    assert (model.model.max_lora_rank, model.model.max_context_length) == (16, 512)
    assert (list(reply.loss_fns), list(reply.optimizers)) == (["ppo"], ["adamw"])
    assert reply.max_message_bytes == 32 << 20
    assert reply.service_version


async def test_capabilities_leave_out_a_service_that_is_down(tmp_path):
    auth = (bearer(add_key(tmp_path / "keys.json", "team-a", "laptop")),)
    async with serving(Sampler()) as port, gateway(free_port(), [port], tmp_path / "keys.json") as client:
        reply = await client.gateway.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=auth)
        assert [(model.trainable, model.sampleable) for model in reply.models] == [(False, True)]
        assert not reply.loss_fns
        services = [(one.kind, one.sampler_id, one.reachable) for one in reply.services]
        assert services == [("gateway", "", True), ("trainer", "", False), ("sampler", "sampler", True)]
        assert reply.services[0].process.memory_bytes > 0
        assert abs(reply.time.ToDatetime(UTC) - datetime.now(UTC)) < timedelta(minutes=1)
    async with gateway(free_port(), [free_port()], tmp_path / "keys.json") as client:
        call = client.gateway.GetCapabilities(pb.GetCapabilitiesRequest(), metadata=auth)
        assert isinstance(await failure(call), errors.UpstreamUnavailable)
