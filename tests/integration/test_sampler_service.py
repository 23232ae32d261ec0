"""The sampler service on a tiny model: tokens, limits, callers that disconnect."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from support.models.tiny_models import VOCAB_SIZE, make_tokenizer
from support.stacks.sampler_stack import (
    PROMPT,
    base_ref,
    sample_request,
    sampling,
    stream_request,
    tokens,
    until,
    version_ref,
)
from support.stacks.weight_stack import BASE, CREDENTIAL, make_version

from paceline import errors
from paceline.layout import new_run_id
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types.v1 import sampling_pb2

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


async def test_streams_and_unary_samples_agree(client):
    answer = await client.sample(base_ref(), num_samples=3, max_tokens=20)
    stream = client.stub.SampleStream(
        stream_request(base_ref(), num_samples=3, max_tokens=20), metadata=client.metadata
    )
    streamed = {index: ([], [], []) for index in range(3)}
    async for message in stream:
        assert message.model.base_model == BASE
        ids, logprobs, reasons = streamed[message.index]
        ids += message.tokens
        logprobs += message.logprobs
        reasons += [message.stop_reason] if message.stop_reason else []
    for index, sequence in enumerate(answer.sequences):
        ids, logprobs, reasons = streamed[index]
        assert ids == np.frombuffer(sequence.tokens.data, np.int32).tolist()
        np.testing.assert_allclose(logprobs, np.frombuffer(sequence.logprobs.data, np.float32), rtol=1e-5)
        assert reasons == [sequence.stop_reason] == [sampling_pb2.STOP_REASON_LENGTH]


async def test_greedy_samples_are_all_the_one_that_is_computed(client):
    answer = await client.sample(base_ref(), num_samples=3, temperature=0.0, max_tokens=8)
    assert [sequence.tokens.data for sequence in answer.sequences] == [answer.sequences[0].tokens.data] * 3
    request = stream_request(base_ref(), num_samples=3, temperature=0.0, max_tokens=8)
    messages = [message async for message in client.stub.SampleStream(request, metadata=client.metadata)]
    for index, sequence in enumerate(answer.sequences):
        streamed = [token for message in messages if message.index == index for token in message.tokens]
        assert streamed == np.frombuffer(sequence.tokens.data, np.int32).tolist()


async def test_nothing_is_sent_after_a_stop_string_that_several_messages_end(client):
    free = await client.sample(base_ref(), max_tokens=60)
    texts = [make_tokenizer().decode([token]) for token in np.frombuffer(free.sequences[0].tokens.data, np.int32)]
    stop = next(run for i in range(10, 58) if len(run := "".join(texts[i : i + 3])) == 3 and run.isascii())
    end = next(i for i in range(60) if stop in "".join(texts[: i + 1])) + 1
    request = stream_request(base_ref(), max_tokens=60, stop=["never", stop])
    messages = [message async for message in client.stub.SampleStream(request, metadata=client.metadata)]
    sent = [make_tokenizer().decode([token]) for message in messages for token in message.tokens]
    assert sent == texts[:end]
    assert messages[-1].stop_reason == sampling_pb2.STOP_REASON_STOP


async def test_structured_outputs_are_refused_by_name_where_there_are_none(client):
    for field, value in (("regex", "a+"), ("json_schema", "{}")):
        with pytest.raises(errors.Unsupported) as failure:
            await client.sample(base_ref(), ignore_eos=False, **{field: value})
        assert failure.value.field == f"params.{field}"
    with pytest.raises(errors.InvalidArgument) as failure:
        await client.sample(base_ref(), ignore_eos=False, json_schema="[")
    assert failure.value.field == "params.json_schema"


async def test_prompt_and_topk_logprobs_come_when_asked_for(client):
    request = sample_request(base_ref())
    request.prompt_logprobs, request.topk_prompt_logprobs, request.topk_logprobs = True, 2, 3
    answer = await client.call("Sample", request)
    logprobs, _ = await client.logprobs(base_ref())
    np.testing.assert_allclose(
        np.frombuffer(answer.prompt_logprobs.data, np.float32), np.frombuffer(logprobs, np.float32), atol=1e-5
    )
    assert list(answer.topk_prompt_logprobs.token_ids.shape) == [len(PROMPT), 2]
    assert list(answer.sequences[0].topk_logprobs.token_ids.shape) == [4, 3]


@pytest.mark.parametrize("how", ["cancel", "deadline", "hang up"])
async def test_a_caller_that_leaves_frees_its_completions(model, port, tmp_path, how):
    async with sampling(model, port, tmp_path, max_waiting=2) as client:
        request = stream_request(base_ref(), num_samples=2, max_tokens=400)
        timeout = 0.5 if how == "deadline" else None
        stream = client.stub.SampleStream(request, metadata=client.metadata, timeout=timeout)
        await stream.read()
        with pytest.raises(errors.Overloaded) as failure:
            await client.sample(base_ref())
        assert failure.value.retry_after
        if how == "cancel":
            stream.cancel()
        elif how == "hang up":
            del stream
        await until(lambda: _answers(client))


async def test_a_unary_call_that_is_cancelled_frees_its_completions(model, port, tmp_path):
    async with sampling(model, port, tmp_path, max_waiting=2) as client:
        call = client.stub.Sample(sample_request(base_ref(), num_samples=2, max_tokens=400), metadata=client.metadata)
        await until(lambda: client.engine.num_running() == 2)
        with pytest.raises(errors.Overloaded):
            await client.sample(base_ref())
        call.cancel()
        await until(lambda: _answers(client))


async def test_a_tenant_is_served_while_another_floods_the_sampler(model, port, tmp_path):
    async with sampling(model, port, tmp_path, max_waiting=16, max_num_seqs=2) as client:
        refusals = 0

        async def flood():
            nonlocal refusals
            while True:
                try:
                    await client.sample(base_ref(), num_samples=4, max_tokens=50)
                except errors.Overloaded:
                    refusals += 1
                    await asyncio.sleep(0.01)

        flooding = [asyncio.create_task(flood()) for _ in range(8)]
        for _ in range(5):
            before = refusals
            await until(lambda before=before: refusals > before)
            served = await client.be("bartali").sample(base_ref(), num_samples=4)
            assert len(served.sequences) == 4
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
        await until(lambda: not client.metric("completions_waiting"))


async def test_a_bad_request_changes_nothing(model, volume, trainer, client):
    make_version(volume, model, RUN, 1)
    with pytest.raises(errors.TokenOutOfRange) as failure:
        await client.sample(version_ref(RUN, 1), prompt=[VOCAB_SIZE])
    assert failure.value.field == "prompt"
    with pytest.raises(errors.MissingField):
        await client.call("Sample", pb.SampleRequest(prompt=tokens(PROMPT)))
    with pytest.raises(errors.MissingField):
        await client.call("Sample", pb.SampleRequest(model=base_ref()))
    assert not trainer.fetched


async def test_strangers_are_not_answered(client):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await client.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=peer_metadata(CREDENTIAL + "?"))
    assert isinstance(error_from_rpc(failure.value), errors.MissingCredential)


async def test_server_info_describes_the_sampler(client):
    info = await client.call("GetServerInfo", pb.GetServerInfoRequest())
    assert (info.model.name, info.model.vocab_size, info.model.max_lora_rank) == (BASE, VOCAB_SIZE, 8)
    assert (info.engine, info.bridge, info.sampler_id) == ("hf", "stream", "domestique")


async def _answers(client):
    try:
        return await client.sample(base_ref())
    except errors.Overloaded:
        return None
