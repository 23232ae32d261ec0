"""A gateway sends nothing to a sampler of another base model than the trainer's, and says so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs
from support.patience import PATIENCE
from support.ports import free_port
from support.stacks.gateway_stack import CREDENTIAL, Sampler, Trainer, bearer, gateway, serving
from support.stacks.sampler_stack import until

from gateway.metrics import add_router_metrics
from gateway.proxy import Router, Upstream
from paceline import errors
from paceline.files.key_changes import add_key
from paceline.gateway.v1 import gateway_service_pb2 as gateway_pb
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb

CASES = [
    ({"base": "other"}, "it serves other, not tiny"),
    ({"weights": "b" * 64}, f"its weights of tiny are others: SHA-256 {'b' * 64}, not {'a' * 64}"),
]
TRAINER = {"weights": "a" * 64}


async def _sample(client, key, times=12):
    calls = [client.sampler.Sample(sampler_pb.SampleRequest(), metadata=[bearer(key)]) for _ in range(times)]
    return [reply.model.base_model for reply in await asyncio.gather(*calls)]


async def _capabilities(client, key):
    return await client.gateway.GetCapabilities(gateway_pb.GetCapabilitiesRequest(), metadata=[bearer(key)])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("other", "told"), CASES)
async def test_a_sampler_of_another_base_model_gets_no_calls_and_is_named(tmp_path, other, told, is_late):
    key = add_key(tmp_path / "keys.json", "team", "laptop")
    good, bad = Sampler("good", weights="a" * 64), Sampler("bad", **other)
    port = free_port()

    def said(*levels):
        events = [line for line in logged if line["event"] == "sampler gets no calls"]
        return [line["reason"] for line in events if line["log_level"] in levels]

    with capture_logs() as logged:
        async with serving(bad) as at, serving(good) as beside, AsyncExitStack() as running:
            if not is_late:
                await running.enter_async_context(serving(Trainer(**TRAINER), port=port))
            started = gateway(port, [at, beside], tmp_path / "keys.json", spill_in_flight=0)
            client = await running.enter_async_context(started)
            if is_late:
                await until(lambda: len(said("info", "error")) == 2)
                assert said("error") == [], "nobody knows yet which of the two is wrong"
                await running.enter_async_context(serving(Trainer(**TRAINER), port=port))
            await until(lambda: said("error"))
            assert set(await _sample(client, key)) == {"good"}
            found = await _capabilities(client, key)
    assert [(one.model.name, one.trainable, one.sampleable) for one in found.models] == [("tiny", True, True)]
    assert list(found.unused_samplers) == [f"bad: {told}"]
    assert said("error") == [told]


@pytest.mark.parametrize(("other", "told"), CASES)
async def test_without_a_sampler_of_the_base_model_calls_end_with_model_not_found(tmp_path, other, told):
    key = add_key(tmp_path / "keys.json", "team", "laptop")
    async with (
        serving(Trainer(**TRAINER)) as trainer,
        serving(Sampler("bad", **other)) as at,
        gateway(trainer, [at], tmp_path / "keys.json") as client,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _sample(client, key, 1)
        found = await _capabilities(client, key)
    error = error_from_rpc(caught.value)
    assert isinstance(error, errors.ModelNotFound)
    assert told in error.message
    assert [one.sampleable for one in found.models] == [False]


async def test_a_sampler_that_comes_back_with_another_model_gets_no_more_calls_until_it_has_the_right_one(tmp_path):
    key = add_key(tmp_path / "keys.json", "team", "laptop")
    port = free_port()
    async with (
        serving(Trainer(**TRAINER)) as trainer,
        serving(Sampler("stays")) as stays,
        gateway(trainer, [port, stays], tmp_path / "keys.json", spill_in_flight=0) as client,
    ):

        async def until(wanted):
            while set(await _sample(client, key)) != wanted:
                pass

        for base, served in (("tiny", {"goes", "stays"}), ("other", {"stays"}), ("tiny", {"goes", "stays"})):
            async with serving(Sampler("goes" if base == "tiny" else "wrong", base=base), port=port):
                if base == "tiny":
                    await asyncio.wait_for(until(served), PATIENCE)
                else:
                    while not (await _capabilities(client, key)).unused_samplers:
                        pass
                    assert set(await _sample(client, key, 40)) == served


async def test_before_the_trainer_was_reached_samplers_that_agree_get_calls_and_others_wait(tmp_path):
    key = add_key(tmp_path / "keys.json", "team", "laptop")
    port = free_port()
    async with (
        serving(Sampler("one")) as one,
        serving(Sampler("two")) as two,
        serving(Sampler("three", base="other")) as three,
    ):
        async with gateway(port, [one, two], tmp_path / "keys.json", spill_in_flight=0) as client:
            assert set(await _sample(client, key)) == {"one", "two"}
        async with gateway(port, [one, two, three], tmp_path / "keys.json", spill_in_flight=0) as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _sample(client, key, 1)
            error = error_from_rpc(caught.value)
            assert isinstance(error, errors.UpstreamUnavailable)
            assert "the trainer cannot be reached" in error.message
            async with serving(Trainer(), port=port):

                async def until_sampled():
                    while True:
                        try:
                            return await _sample(client, key)
                        except grpc.aio.AioRpcError as failure:
                            if not isinstance(error_from_rpc(failure), errors.UpstreamUnavailable):
                                raise

                assert set(await asyncio.wait_for(until_sampled(), PATIENCE)) == {"one", "two"}
            # The trainer is down again: what it serves is known.
            assert set(await _sample(client, key)) == {"one", "two"}


async def test_a_sampler_that_refuses_all_requests_comes_last_and_is_named(tmp_path):
    key = add_key(tmp_path / "keys.json", "team", "laptop")
    async with (
        serving(Trainer()) as trainer,
        serving(Sampler("refuses", refusal="it computes differently")) as refuses,
        serving(Sampler("serves")) as serves,
        gateway(trainer, [refuses, serves], tmp_path / "keys.json", spill_in_flight=0) as client,
    ):
        assert set(await _sample(client, key)) == {"serves"}
        assert list((await _capabilities(client, key)).unused_samplers) == ["refuses: it computes differently"]


async def test_the_metric_names_the_sampler(tmp_path):
    registry = CollectorRegistry()
    async with serving(Trainer()) as trainer, serving(Sampler(base="other")) as at, serving(Sampler()) as good:
        named = [("trainer", trainer), ("sampler", at), ("sampler", good)]
        upstreams = [Upstream(name, f"127.0.0.1:{port}", None, CREDENTIAL) for name, port in named]
        add_router_metrics(Router(upstreams[0], upstreams[1:], 0), registry)
        for upstream in upstreams:
            upstream.connect()
        await asyncio.wait_for(asyncio.gather(*(upstream.settled.wait() for upstream in upstreams)), PATIENCE)
        text = generate_latest(registry).decode()
        for upstream in upstreams:
            await upstream.close()
    assert f'paceline_gateway_sampler_unused{{target="127.0.0.1:{at}"}} 1.0' in text
    assert f'paceline_gateway_sampler_unused{{target="127.0.0.1:{good}"}} 0.0' in text
