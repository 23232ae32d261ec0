"""An engine that dies is rebuilt inside the running service, with its versions."""

from __future__ import annotations

import asyncio
import shutil

import grpc
import numpy as np
import pytest
from support.descendants import descendants
from support.models.model_versions import RUN as MODEL_RUN
from support.models.model_versions import close, expected, publish_and_check
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.sampler_stack import base_ref, sampling, stream_request, until, version_ref
from support.stacks.weight_stack import make_adapter, make_checkpoint, make_version

from paceline import errors
from paceline.layout import MODEL_FILE, WEIGHTS_FILE, CheckpointPath, new_run_id
from paceline.rpc.status import DETAILS_KEY, error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import CheckpointKind
from paceline.types.v1 import model_pb2

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


async def greedy(client, ref):
    answer = await client.sample(ref, temperature=0, max_tokens=16)
    return np.frombuffer(answer.sequences[0].tokens.data, np.int32).tolist()


async def published(model, volume, trainer, version):
    """Announce a version, wait until it is loaded, and return a reference to it."""
    trainer.announce(make_version(volume, model, RUN, version))
    await until(lambda: version in [ack.version for ack in trainer.heard("acknowledgement")])
    return version_ref(RUN, version)


async def comes_back(client):
    await until(lambda: client.metric("engine_restarts_total"))
    await until(client.is_ready)


async def test_vllm_that_is_killed_comes_back_with_its_versions(model, volume, trainer, port, tmp_path, vllm_here):
    settings = {"engine": "vllm", "enforce_eager": True, "keep_versions": 3}
    others = descendants("EngineCore")  # engines that other tests of this process keep
    async with sampling(model, port, tmp_path, **settings) as client:
        refs = [base_ref(), *[await published(model, volume, trainer, version) for version in (1, 2)]]
        tokens = [await greedy(client, ref) for ref in refs]
        # Do all slow work first: the engine must still be down when the requests after its death arrive.
        (engine,) = set(descendants("EngineCore")).difference(others)
        parent, third = engine.parent(), make_version(volume, model, RUN, 3)
        requests = [stream_request(ref, max_tokens=400) for ref in refs]
        streams = [client.stub.SampleStream(request, metadata=client.metadata) for request in requests]
        engine.suspend()  # otherwise a stream may end before it
        await until(lambda: client.engine.num_running() == len(streams))
        parent.kill()  # the process that forked the engine, which ends with it
        for stream in streams:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                while await stream.read() is not grpc.aio.EOF:
                    pass
            _asks_to_try_again(failure.value)
        await until(lambda: _is_not_ready(client))
        trainer.announce(third)
        for ref in (*refs, version_ref(RUN, 3)):
            with pytest.raises(errors.EngineUnavailable) as unavailable:
                await client.sample(ref)
            assert unavailable.value.retry_after
        await comes_back(client)
        assert [await greedy(client, ref) for ref in refs] == tokens
        await until(lambda: 3 in [ack.version for ack in trainer.heard("acknowledgement")])
        assert sorted(trainer.fetched) == ["1", "2", "3"]
        assert client.metric("engine_restarts_total") == 1


async def test_a_sampler_says_that_its_engine_is_dead_until_it_is_back(client):
    async def refusal():
        return (await client.call("GetServerInfo", pb.GetServerInfoRequest())).refusal

    assert not await refusal()
    await client.engine.stop()
    assert await refusal()
    await comes_back(client)
    assert not await refusal()


async def test_a_version_whose_files_were_lost_is_fetched_again_by_itself(model, volume, trainer, client):
    ref = await published(model, volume, trainer, 1)
    tokens = await greedy(client, ref)
    (staged,) = client.staged()
    shutil.rmtree(staged)
    await client.engine.stop()
    await comes_back(client)
    await until(lambda: trainer.fetched == ["1", "1"])
    await until(client.loaded)
    assert await greedy(client, ref) == tokens
    assert not trainer.heard("release")


async def test_a_version_that_goes_while_the_engine_is_dead_is_not_brought_back(model, volume, trainer, client):
    ref = await published(model, volume, trainer, 1)
    await client.engine.stop()
    await client.call("UnloadVersion", pb.UnloadVersionRequest(model=ref))
    await until(lambda: trainer.heard("release"))
    await comes_back(client)
    assert not await client.loaded()
    assert not client.staged()


async def test_a_version_whose_bytes_changed_is_fetched_again_and_no_other_bytes_are_served(
    model, volume, trainer, client
):
    ref = await published(model, volume, trainer, 1)
    tokens = await greedy(client, ref)
    (staged,) = client.staged()
    shutil.copyfile(make_adapter(client.staging / "other", model, seed=7) / WEIGHTS_FILE, staged / WEIGHTS_FILE)
    await client.engine.stop()
    await comes_back(client)
    await until(lambda: trainer.fetched == ["1", "1"])
    await until(client.loaded)
    assert await greedy(client, ref) == tokens


async def test_a_checkpoint_that_was_overwritten_is_not_served_under_the_content_before(model, volume, port, tmp_path):
    path = str(CheckpointPath(RUN, CheckpointKind.SAMPLER, "best"))
    before = make_checkpoint(volume, model, path, seed=1)
    async with sampling(model, port, tmp_path, bridge="volume") as client:
        ref = model_pb2.ModelRef(checkpoint=path)
        old = await client.sample(ref, temperature=0)
        assert old.model.blake3 == before.model.blake3
        after = make_checkpoint(volume, model, path, seed=2)
        await client.engine.stop()
        await comes_back(client)
        new = await client.sample(ref, temperature=0)
        assert new.model.blake3 == after.model.blake3
        loaded = (await client.call("ListVersions", pb.ListVersionsRequest())).versions
        assert [one.model.blake3 for one in loaded] == [after.model.blake3]


async def test_a_whole_model_whose_bytes_changed_gives_way_to_the_base_model(model, volume, trainer, port, tmp_path):
    async with sampling(model, port, tmp_path, bridge="restart") as client:
        await publish_and_check(volume, trainer, client, 1)
        other = make_tiny_llama(tmp_path / "other", seed=7)
        shutil.copyfile(other / MODEL_FILE, volume.version(MODEL_RUN, 1) / MODEL_FILE)
        await client.engine.stop()
        await comes_back(client)
        with pytest.raises(errors.ChecksumMismatch, match=MODEL_FILE):
            await client.logprobs(version_ref(MODEL_RUN, 1))
        assert close((await client.logprobs(base_ref()))[0], expected(model))


async def test_another_base_model_in_the_place_of_the_first_is_not_served(port, tmp_path):
    model = make_tiny_llama(tmp_path / "model")
    async with sampling(model, port, tmp_path, engine_restarts=1) as client:
        make_tiny_llama(model, seed=7)
        await client.engine.stop()
        await asyncio.wait_for(client.readiness.failed.wait(), PATIENCE)
        assert "are not those that the sampler started with" in client.readiness.failure
        with pytest.raises(errors.EngineUnavailable):
            await client.sample(base_ref())


async def test_an_engine_that_does_not_come_up_again_fails_the_service(port, tmp_path):
    model = make_tiny_llama(tmp_path / "model")
    async with sampling(model, port, tmp_path, engine_restarts=1) as client:
        shutil.rmtree(model)
        await client.engine.stop()
        await asyncio.wait_for(client.readiness.failed.wait(), PATIENCE)
        assert "the engine died; restarting it 1 times did not help" in client.readiness.failure
        assert not await client.is_ready()
        with pytest.raises(errors.EngineUnavailable):
            await client.sample(base_ref())


async def _is_not_ready(client):
    return not await client.is_ready()


def _asks_to_try_again(failure):
    assert failure.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error_from_rpc(failure), errors.EngineUnavailable)
    assert b"google.rpc.RetryInfo" in dict(failure.trailing_metadata())[DETAILS_KEY]
