"""Sampling through the client, against real services: limits, deadlines, streams, cancellation."""

import asyncio
from concurrent.futures import CancelledError

import numpy as np
import pytest
from support.cut_proxy import CutProxy
from support.patience import PATIENCE
from support.stacks.cluster import wait_for

from paceline import RetryPolicy, SamplingParams, ServiceClient, StopReason, Timeouts, errors
from paceline.client.retry import is_retryable
from paceline.rpc.channel import CHANNEL_OPTIONS as OPTIONS

QUICK = RetryPolicy(budget=60.0, first_delay=0.01, max_delay=0.05)
SHORT = SamplingParams(max_tokens=3)
ENDLESS = SamplingParams(max_tokens=10**9)


@pytest.fixture
async def client(server):
    async with ServiceClient(server.address, retry=QUICK) as connected:
        yield connected


async def test_all_of_5000_samples_succeed_and_never_more_than_500_are_in_flight(server, client):
    server.sampler.crowd = 500
    server.sampler.may_answer.clear()
    sampling = client.create_sampling_client()
    futures = [sampling.sample([first], sampling_params=SHORT) for first in range(5000)]
    await server.sampler.crowded.wait()
    async with ServiceClient(server.address) as other:
        for _ in range(20):
            await other.get_run_async(server.trainer.run_id)
    server.sampler.may_answer.set()
    results = await asyncio.gather(*futures)
    assert [result.sequences[0].tokens[0] for result in results] == list(range(1, 5001))
    assert server.sampler.most_in_flight == 500


async def test_an_overloaded_sampler_is_asked_again(server, client):
    server.sampler.refusals = [errors.Overloaded("full", retry_after=0.01) for _ in range(3)]
    result = await client.create_sampling_client().sample([4], sampling_params=SHORT)
    assert result.sequences[0].tokens.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("params", "remedy"),
    [(SHORT, "give ServiceClient"), (None, "set SamplingParams.max_tokens, or give ServiceClient")],
)
async def test_a_sample_that_is_not_answered_in_time_says_which_timeout_ended_it(server, params, remedy):
    server.sampler.may_answer.clear()
    async with ServiceClient(server.address, timeouts=Timeouts(sampling=0.2)) as client:
        with pytest.raises(errors.TimedOut) as caught:
            await client.create_sampling_client().sample([1], sampling_params=params)
    message = f"not finished within 0.2 s (Timeouts.sampling); {remedy}(timeouts=Timeouts(sampling=...)) a longer one"
    assert caught.value.message == message


@pytest.mark.parametrize("silent_after", [0, 2])
async def test_a_stream_that_does_not_end_in_time_says_which_timeout_ended_it(server, silent_after):
    server.sampler.silent_after = silent_after
    async with ServiceClient(server.address, timeouts=Timeouts(sampling=0.2)) as client:
        with pytest.raises(errors.TimedOut, match=r"within 0.2 s \(Timeouts.sampling\); give ServiceClient") as caught:
            async for _ in client.create_sampling_client().sample_stream([1], sampling_params=SHORT):
                pass
    assert caught.value.metadata["received_tokens"] == str(silent_after)


async def test_a_deadline_of_the_service_keeps_its_own_message(server, client):
    server.sampler.refusals = [errors.TimedOut("the engine took too long")]
    with pytest.raises(errors.TimedOut, match=r"^the engine took too long$"):
        await client.create_sampling_client().sample([1], sampling_params=SHORT)


async def test_a_slow_sample_without_a_limit_is_explained_once_per_connection(server, client, caplog, monkeypatch):
    monkeypatch.setattr("paceline.client.sampling_client.UNLIMITED_NOTICE_SECONDS", 0.05)
    server.sampler.may_answer.clear()
    limited = client.create_sampling_client().sample([1], sampling_params=SHORT)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(limited.result, 0.2)
    assert caplog.messages == []
    unlimited = [client.create_sampling_client().sample([1]) for _ in range(3)]
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(unlimited[-1].result, 0.5)
    (message,) = caplog.messages
    assert "max_tokens is unset" in message
    assert "SamplingParams(max_tokens=...)" in message
    server.sampler.may_answer.set()
    await asyncio.gather(limited, *unlimited)


async def test_a_quick_sample_without_a_limit_is_not_remarked_on(server, client, caplog, monkeypatch):
    monkeypatch.setattr("paceline.client.sampling_client.UNLIMITED_NOTICE_SECONDS", 0.5)
    await client.create_sampling_client().sample([1])
    server.sampler.may_answer.clear()
    async with ServiceClient(server.address) as other:
        later = other.create_sampling_client().sample([1])  # a remark on the first would come before that on this one
        await asyncio.to_thread(wait_for, lambda: caplog.messages)
        server.sampler.may_answer.set()
        await later
    assert len(caplog.messages) == 1


async def test_cancelling_a_sample_cancels_it_on_the_server(server, client):
    server.sampler.may_answer.clear()
    future = client.create_sampling_client().sample([1], sampling_params=SHORT)
    await server.sampler.entered.wait()
    assert future.cancel()
    await server.sampler.left.wait()
    assert server.sampler.answered == 0
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    with pytest.raises(asyncio.CancelledError):
        await future


async def test_a_stream_gives_every_token_and_ends(client):
    stream = client.create_sampling_client().sample_stream([1], sampling_params=SamplingParams(max_tokens=20))
    deltas = [delta async for delta in stream]
    assert [token for delta in deltas for token in delta.tokens] == list(range(20))
    assert [delta.stop_reason for delta in deltas] == [None] * 19 + [StopReason.LENGTH]


async def test_a_stream_is_retried_before_its_first_tokens(server, client):
    server.sampler.refusals = [errors.EngineUnavailable("starting", retry_after=0.01)]
    stream = client.create_sampling_client().sample_stream([1], sampling_params=SHORT)
    assert len([delta async for delta in stream]) == 3


async def test_a_stream_whose_connection_is_lost_says_so_and_how_much_had_come(server, client):
    stream = aiter(client.create_sampling_client().sample_stream([1], sampling_params=ENDLESS))
    await anext(stream)
    await server.stop()
    received = 1
    told = f"the gateway at {server.address} does not answer; see whether it runs"
    with pytest.raises(errors.UpstreamUnavailable, match=told) as lost:
        async for delta in stream:
            received += len(delta.tokens)
    assert lost.value.metadata == {"received_tokens": str(received)}
    assert f"{received} tokens had been received" in lost.value.message


@pytest.mark.parametrize("refusal", [errors.RankTooLarge("too large", metadata={"a": "b"}), errors.Overloaded("full")])
async def test_a_stream_that_is_refused_had_received_nothing(server, refusal):
    server.sampler.refusals = [refusal]
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.0)) as client:
        with pytest.raises(type(refusal)) as caught:
            await anext(aiter(client.create_sampling_client().sample_stream([1])))
    assert caught.value.metadata == {**refusal.metadata, "received_tokens": "0"}
    assert caught.value.message == refusal.message


async def test_only_the_stream_among_the_calls_that_found_no_gateway_counts_tokens(server):
    await server.stop()
    async with ServiceClient(server.address, timeouts=Timeouts(connect=0.2)) as client:
        sampling = client.create_sampling_client()
        stream = aiter(sampling.sample_stream([1]))
        failures = await asyncio.gather(sampling.sample([1]), anext(stream), return_exceptions=True)
    assert [type(failure) for failure in failures] == [errors.UpstreamUnavailable] * 2
    assert [failure.metadata for failure in failures] == [{}, {"received_tokens": "0"}]


async def test_a_stream_notices_a_network_that_is_silent(server, monkeypatch):
    """The keepalive times and timeouts are a tenth of the clients' own."""
    short = [(name, value // 10 if name.endswith(("time_ms", "timeout_ms")) else value) for name, value in OPTIONS]
    assert dict(short)["grpc.keepalive_time_ms"] + dict(short)["grpc.http2.ping_timeout_ms"] == 2_000
    monkeypatch.setattr("paceline.rpc.channel.CHANNEL_OPTIONS", tuple(short))
    server.sampler.silent_after = 3
    async with CutProxy(server.port).running() as network, ServiceClient(f"127.0.0.1:{network.port}") as client:
        stream = aiter(client.create_sampling_client().sample_stream([1], sampling_params=ENDLESS))
        for _ in range(3):
            await anext(stream)
        network.cut()
        with pytest.raises(errors.UpstreamUnavailable, match="ping timeout") as lost:
            await asyncio.wait_for(anext(stream), PATIENCE)
        assert lost.value.metadata == {"received_tokens": "3"}
        assert is_retryable(lost.value)


async def test_leaving_an_async_stream_early_cancels_it_on_the_server(server, client):
    stream = client.create_sampling_client().sample_stream([1], sampling_params=ENDLESS)
    async for delta in stream:
        if delta.tokens[0] == 5:
            break
    await server.sampler.stream_ended.wait()


async def test_leaving_a_sync_stream_early_cancels_it_on_the_server(server, client):
    def take_some():
        stream = client.create_sampling_client().sample_stream([1], sampling_params=ENDLESS)
        for delta in stream:
            if delta.tokens[0] == 5:
                return

    await asyncio.to_thread(take_some)
    await server.sampler.stream_ended.wait()


async def test_streams_give_their_room_back(server):
    async with ServiceClient(server.address, max_in_flight=1) as client:
        sampling = client.create_sampling_client()
        for _ in range(3):
            async for _ in sampling.sample_stream([1], sampling_params=ENDLESS):
                break
        assert len((await sampling.sample([1], sampling_params=SHORT)).sequences) == 1


async def test_a_cancelled_reader_cancels_a_silent_stream(server, client):
    server.sampler.silent = True

    async def read():
        async for _ in client.create_sampling_client().sample_stream([1], sampling_params=SHORT):
            pass

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(), 0.2)
    await server.sampler.stream_ended.wait()


async def read_async(stream, received):
    async for delta in stream:
        received.extend(delta.tokens)


async def read_sync(stream, received):
    def read():
        for delta in stream:
            received.extend(delta.tokens)

    await asyncio.to_thread(read)


@pytest.mark.parametrize("read", [read_async, read_sync])
async def test_a_stream_closed_before_its_first_message_ends_on_both_sides_and_gives_its_room_back(server, read):
    server.sampler.may_answer.clear()
    async with ServiceClient(server.address, max_in_flight=1) as client:
        sampling = client.create_sampling_client()
        stream, received = sampling.sample_stream([1], sampling_params=ENDLESS), []
        reading = asyncio.ensure_future(read(stream, received))
        await server.sampler.entered.wait()
        await asyncio.to_thread(stream.close)
        server.sampler.may_answer.set()
        await reading
        await server.sampler.stream_ended.wait()
        assert received == []
        assert len((await sampling.sample([1], sampling_params=SHORT)).sequences) == 1


async def test_a_stream_closed_while_it_waits_for_room_is_never_sent(server):
    server.sampler.may_answer.clear()
    async with ServiceClient(server.address, max_in_flight=1) as client:
        sampling = client.create_sampling_client()
        sample = sampling.sample([1], sampling_params=SHORT)
        await server.sampler.entered.wait()
        stream, received = sampling.sample_stream([1], sampling_params=SHORT), []
        reading = asyncio.ensure_future(read_sync(stream, received))
        await round_trips(server)
        stream.close()
        await reading
        server.sampler.may_answer.set()
        await sample
        await sampling.sample([1], sampling_params=SHORT)
    assert received == []
    assert not server.sampler.stream_ended.is_set()


@pytest.mark.parametrize("read", [read_async, read_sync])
async def test_closing_a_stream_from_another_thread_ends_its_iteration(server, client, read):
    server.sampler.silent_after = 2
    stream, received = client.create_sampling_client().sample_stream([1], sampling_params=SHORT), []
    reading = asyncio.ensure_future(read(stream, received))
    while len(received) < 2:
        await round_trips(server)
    await round_trips(server)
    await asyncio.to_thread(stream.close)
    await reading
    await server.sampler.stream_ended.wait()
    assert received == [0, 1]


@pytest.mark.parametrize("read", [read_async, read_sync])
async def test_a_stream_closed_before_it_is_read_gives_nothing_and_is_never_sent(server, client, read):
    stream, received = client.create_sampling_client().sample_stream([1], sampling_params=SHORT), []
    stream.close()
    await read(stream, received)
    assert received == []
    assert not server.sampler.entered.is_set()


async def round_trips(server):
    """Let other threads and calls go on until they can only wait."""
    async with ServiceClient(server.address) as other:
        for _ in range(10):
            await other.get_run_async(server.trainer.run_id)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], errors.EmptyBatch),
        ([[1, 2]], errors.InvalidShape),
        ([0.5], errors.InvalidDtype),
        ("hello", errors.InvalidDtype),
        (["hello", "there"], errors.InvalidDtype),
    ],
)
async def test_a_prompt_that_is_no_row_of_token_ids_is_refused_before_it_is_sent(server, client, prompt, error):
    with pytest.raises(error) as caught:
        client.create_sampling_client().sample(prompt)
    assert caught.value.field == "prompt"
    assert server.sampler.routes == []


async def test_sampling_params_of_another_type_are_refused_by_name(client):
    sampling = client.create_sampling_client(base_model="model")
    for sample in (sampling.sample, sampling.sample_stream):
        with pytest.raises(errors.InvalidArgument, match="SamplingParams") as caught:
            sample(np.array([1]), 1, {"max_tokens": 2})
        assert caught.value.field == "sampling_params"


async def test_one_set_of_weights_is_named_at_a_time(client):
    with pytest.raises(errors.InvalidArgument):
        client.create_sampling_client("paceline://a/sampler/b", run_id="a")
    with pytest.raises(errors.InvalidArgument):
        client.create_sampling_client(version=3)
