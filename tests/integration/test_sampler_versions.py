"""Versions are loaded into a sampler on a tiny model, used, and unloaded."""

from __future__ import annotations

import asyncio
import shutil

import grpc
import pytest
from blake3 import blake3
from support.stacks.sampler_stack import base_ref, sampling, stream_request, until, version_ref
from support.stacks.weight_stack import BASE, Trainer, make_checkpoint, make_version, serving

from paceline import errors
from paceline.layout import WEIGHTS_FILE, Volume, new_directory, new_run_id
from paceline.rpc.identity import PEER_TENANT
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types.v1 import model_pb2
from paceline.weights import write_manifest
from paceline.weights.v1 import weight_service_pb2 as weights_pb

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


async def test_an_announced_version_is_loaded_and_acknowledged_with_the_checksum_of_its_bytes(
    model, volume, trainer, client
):
    manifest = make_version(volume, model, RUN, 1)
    trainer.announce(manifest)
    (ack,) = await until(lambda: trainer.heard("acknowledgement"))
    weights = volume.version(RUN, 1) / WEIGHTS_FILE
    assert (ack.run_id, ack.version, ack.sampler_id) == (RUN, 1, "domestique")
    assert ack.blake3 == blake3(weights.read_bytes()).hexdigest()
    assert ack.milliseconds > 0
    assert (await client.loaded())[1].size_bytes == weights.stat().st_size


async def test_a_version_that_is_announced_again_from_the_volume_is_measured_once(model, volume, trainer, client):
    manifest = make_version(volume, model, RUN, 1)
    for volume_path in ("", str(volume.version(RUN, 1).relative_to(volume.root))):
        count = len(trainer.heard("acknowledgement"))
        trainer.announce(manifest, volume_path)
        await until(lambda count=count: len(trainer.heard("acknowledgement")) > count)
    assert client.metric("apply_seconds_count") == 1


async def test_versions_differ_from_the_base_model_and_from_each_other_and_say_which_they_are(
    model, volume, trainer, client
):
    for version in (1, 2):
        make_version(volume, model, RUN, version)
    base, served = await client.logprobs(base_ref())
    assert served == model_pb2.ServedModel(base_model=BASE)
    first, served_first = await client.logprobs(version_ref(RUN, 1))
    second, served_second = await client.logprobs(version_ref(RUN, 2))
    assert len({base, first, second}) == 3
    assert (served_first.version, served_second.version) == (1, 2)
    assert served_first.blake3 != served_second.blake3


async def test_a_version_whose_computation_overflows_says_so_and_no_other_request_notices(
    model, volume, trainer, client
):
    make_version(volume, model, RUN, 4, factor=1e30)
    make_version(volume, model, RUN, 5)
    overflowing = version_ref(RUN, 4)
    calls = [client.sample(overflowing), client.logprobs(overflowing)]
    others = [client.sample(ref) for ref in (base_ref(), version_ref(RUN, 5))]
    *refused, base, other = await asyncio.gather(*calls, *others, return_exceptions=True)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        _ = [
            message async for message in client.stub.SampleStream(stream_request(overflowing), metadata=client.metadata)
        ]
    for error in (*refused, error_from_rpc(ended.value)):
        assert isinstance(error, errors.NonFinite)
        assert error.message.startswith(f"version 4 of {RUN} gives NaN")
    assert (base.model.version, other.model.version) == (0, 5)


async def test_a_version_is_fetched_on_demand_once_for_all_who_wait(model, volume, trainer, client):
    make_version(volume, model, RUN, 3)
    answers = await asyncio.gather(*(client.sample(version_ref(RUN, 3)) for _ in range(8)))
    assert {answer.model.version for answer in answers} == {3}
    assert trainer.fetched == ["3"]


async def test_the_newest_version_is_the_last_announced_one(model, volume, trainer, client):
    for version in (1, 2):
        trainer.announce(make_version(volume, model, RUN, version))
    await until(lambda: len(trainer.heard("acknowledgement")) == 2)
    assert (await client.sample(version_ref(RUN))).model.version == 2


async def test_a_restarted_trainer_sends_samplers_back_only_to_what_it_calls_the_newest(model, volume, trainer, client):
    older, newest = (make_version(volume, model, RUN, version) for version in (1, 2))
    trainer.announce(newest)
    await until(lambda: trainer.heard("acknowledgement"))
    shutil.rmtree(volume.version(RUN, 2))  # it had not reached the volume
    trainer.restart("after the crash")
    await until(lambda: len(trainer.heard("hello")) == 2)
    trainer.announce(older, newest=2)
    await until(lambda: [ack.version for ack in trainer.heard("acknowledgement")] == [2, 1])
    assert (await client.sample(version_ref(RUN))).model.version == 2
    trainer.announce(older, newest=1)
    await until(lambda: [ack.version for ack in trainer.heard("acknowledgement")] == [2, 1, 1])
    assert (await client.sample(version_ref(RUN))).model.version == 1
    trainer.announce(make_version(volume, model, RUN, 3), f"runs/{RUN}/versions/3", newest=4)
    await until(lambda: [ack.version for ack in trainer.heard("acknowledgement")] == [2, 1, 1, 3])
    assert (await client.sample(version_ref(RUN))).model.version == 3


async def test_what_was_announced_before_a_restart_and_is_not_there_is_no_longer_the_newest(
    model, volume, trainer, client
):
    trainer.announce(make_version(volume, model, RUN, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    lost = make_version(volume, model, RUN, 2)
    shutil.rmtree(volume.version(RUN, 2))
    trainer.announce(lost)
    await until(lambda: trainer.heard("refusal"))
    trainer.restart("after the crash")
    await until(lambda: len(trainer.heard("hello")) == 2)
    trainer.announce(make_version(volume, model, new_run_id(), 1))  # the sampler hears it after the welcome
    await until(lambda: len(trainer.heard("acknowledgement")) == 2)
    assert (await client.sample(version_ref(RUN))).model.version == 1


async def test_the_newest_version_is_asked_for_where_none_was_announced(model, volume, client):
    make_version(volume, model, RUN, 4)
    make_version(volume, model, RUN, 5)
    assert (await client.sample(version_ref(RUN))).model.version == 5


async def test_an_unknown_version_is_not_found_and_never_replaced_by_another(model, volume, trainer, client):
    trainer.announce(make_version(volume, model, RUN, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    with pytest.raises(errors.VersionNotFound):
        await client.sample(version_ref(RUN, 9))
    with pytest.raises(errors.RunNotFound):
        await client.sample(version_ref(new_run_id(), 1))
    with pytest.raises(errors.CheckpointNotFound):
        await client.sample(model_pb2.ModelRef(checkpoint=f"paceline://{RUN}/sampler/none"))
    with pytest.raises(errors.ModelNotFound):
        await client.sample(base_ref("another"))


async def test_damaged_bytes_are_refused_and_nothing_is_loaded(model, volume, trainer, client):
    trainer.damage = True
    trainer.announce(make_version(volume, model, RUN, 1))
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert (refusal.run_id, refusal.version, refusal.reason) == (RUN, 1, "CHECKSUM_MISMATCH")
    with pytest.raises(errors.ChecksumMismatch):
        await client.sample(version_ref(RUN, 1))
    assert not await client.loaded()
    assert not client.staged()


async def test_a_rank_above_the_limit_is_refused_before_a_byte_travels(model, volume, trainer, client):
    trainer.announce(make_version(volume, model, RUN, 1, rank=16))
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert refusal.reason == "RANK_TOO_LARGE"
    with pytest.raises(errors.RankTooLarge):
        await client.sample(version_ref(RUN, 1))


async def test_an_adapter_of_another_base_model_is_refused(model, volume, trainer, client):
    manifest = make_version(volume, model, RUN, 1)
    manifest.model.base_model = "another"
    write_manifest(volume.version(RUN, 1), manifest)
    with pytest.raises(errors.ModelNotFound):
        await client.sample(version_ref(RUN, 1))


@pytest.mark.parametrize("loaded", [False, True])
async def test_anothers_version_looks_absent_whether_it_is_loaded_or_not(model, volume, trainer, client, loaded):
    manifest = make_version(volume, model, RUN, 1)
    if loaded:
        trainer.announce(manifest)
        await until(lambda: trainer.heard("acknowledgement"))
    stranger = client.be("stranger")
    for ref in (version_ref(RUN, 1), version_ref(RUN)):
        with pytest.raises(errors.RunNotFound):
            await stranger.sample(ref)
    assert not (await stranger.call("ListVersions", pb.ListVersionsRequest())).versions
    with pytest.raises(errors.NotFound):
        await stranger.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(RUN, 1)))
    assert bool(await client.loaded()) is loaded
    assert (await client.be(PEER_TENANT).sample(version_ref(RUN, 1))).model.version == 1


async def test_a_checkpoint_that_is_overwritten_is_served_with_its_new_content(model, volume, client):
    path = f"paceline://{RUN}/sampler/best"
    ref = model_pb2.ModelRef(checkpoint=path)
    old = make_checkpoint(volume, model, path, seed=1)
    assert (await client.sample(ref)).model.blake3 == old.model.blake3
    new = make_checkpoint(volume, model, path, seed=2)
    assert (await client.sample(ref)).model == new.model
    shutil.rmtree(volume.root)
    with pytest.raises(errors.CheckpointNotFound):
        await client.sample(ref)


async def test_the_volume_bridge_waits_for_the_volume_and_copies_nothing(model, volume, trainer, port, tmp_path):
    async with sampling(model, port, tmp_path, bridge="volume") as client:
        manifest = make_version(volume, model, RUN, 1)
        trainer.announce(manifest)
        trainer.announce(manifest, f"runs/{RUN}/versions/1")
        (ack,) = await until(lambda: trainer.heard("acknowledgement"))
        assert ack.blake3 == manifest.model.blake3
        assert [hello.needs_volume for hello in trainer.heard("hello")] == [True]
        assert (await client.sample(version_ref(RUN, 1))).model == manifest.model
        assert not trainer.fetched
        assert not client.staged()
        with pytest.raises(errors.VersionNotFound):
            await client.sample(version_ref(RUN, 2))
        with pytest.raises(errors.RunNotFound):
            await client.be("stranger").sample(version_ref(RUN, 1))


async def test_the_volume_bridge_goes_on_to_each_version_that_reaches_the_volume(
    model, volume, trainer, port, tmp_path
):
    async with sampling(model, port, tmp_path, bridge="volume", keep_versions=1) as client:
        first, second, third = (make_version(volume, model, RUN, version) for version in (1, 2, 3))
        trainer.announce(first, f"runs/{RUN}/versions/1")
        await until(lambda: trainer.heard("acknowledgement"))
        trainer.announce(second)
        trainer.announce(third)
        trainer.announce(second, f"runs/{RUN}/versions/2", newest=3)
        await until(lambda: [ack.version for ack in trainer.heard("acknowledgement")] == [1, 2])
        assert (await client.sample(version_ref(RUN))).model.version == 2
        trainer.announce(third, f"runs/{RUN}/versions/3")
        await until(lambda: [ack.version for ack in trainer.heard("acknowledgement")] == [1, 2, 3])
        assert (await client.sample(version_ref(RUN))).model.version == 3


async def test_the_first_answer_from_the_volume_does_not_wait_for_what_is_not_there(model, volume, tmp_path):
    memory = Volume(tmp_path / "memory")
    for version in (1, 2, 3):
        make_version(memory, model, RUN, version)
    trainer = Trainer(memory)
    async with serving(trainer) as port, sampling(model, port, tmp_path, bridge="volume") as client:
        first, second = (make_version(volume, model, RUN, version) for version in (1, 2))
        trainer.announce(second, f"runs/{RUN}/versions/2", newest=3)
        await until(lambda: [ack.version for ack in trainer.heard("acknowledgement")] == [2])
        assert (await client.sample(version_ref(RUN))).model.version == 2
        trainer.announce(first, f"runs/{RUN}/versions/1", newest=3)
        await until(lambda: [ack.version for ack in trainer.heard("acknowledgement")] == [2, 1])
        assert (await client.sample(version_ref(RUN))).model.version == 2


async def test_a_version_on_its_way_to_the_volume_is_waited_for(model, volume, tmp_path):
    memory = Volume(tmp_path / "memory")
    manifest = make_version(memory, model, RUN, 1)
    async with serving(Trainer(memory)) as port, sampling(model, port, tmp_path, bridge="volume") as client:
        asked = asyncio.create_task(client.sample(version_ref(RUN, 1)))
        await asyncio.wait({asked}, timeout=0.2)
        assert not asked.done()
        with new_directory(volume.version(RUN, 1)) as staging:
            shutil.copytree(memory.version(RUN, 1), staging, dirs_exist_ok=True)
        assert (await asked).model == manifest.model


async def test_a_version_that_will_never_reach_the_volume_is_not_waited_for(model, volume, tmp_path):
    memory = Volume(tmp_path / "memory")
    make_version(memory, model, RUN, 1)
    async with serving(Trainer(memory)) as port, sampling(model, port, tmp_path, bridge="volume") as client:
        asked = asyncio.create_task(client.sample(version_ref(RUN, 1)))
        await asyncio.wait({asked}, timeout=0.2)
        shutil.rmtree(memory.version(RUN, 1))
        with pytest.raises(errors.NotFound):
            await asked


async def test_a_version_that_is_damaged_on_the_volume_is_refused(model, volume, trainer, port, tmp_path):
    async with sampling(model, port, tmp_path, bridge="volume") as client:
        trainer_manifest = make_version(volume, model, RUN, 1)
        weights = volume.version(RUN, 1) / WEIGHTS_FILE
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        trainer.announce(trainer_manifest, f"runs/{RUN}/versions/1")
        (refusal,) = await until(lambda: trainer.heard("refusal"))
        assert refusal.reason == "CHECKSUM_MISMATCH"
        with pytest.raises(errors.ChecksumMismatch):
            await client.sample(version_ref(RUN, 1))
        assert not await client.loaded()


async def test_a_streaming_sampler_without_its_trainer_reads_the_volume(model, volume, trainer, tmp_path):
    async with serving(trainer) as port:
        pass
    async with sampling(model, port, tmp_path) as client:
        manifest = make_version(volume, model, RUN, 1)
        assert (await client.sample(version_ref(RUN, 1))).model == manifest.model
        for unknown in (version_ref(RUN, 2), version_ref(RUN)):
            with pytest.raises(errors.TrainerUnavailable) as failure:
                await client.sample(unknown)
            assert failure.value.retry_after


async def test_loaded_versions_outlive_the_trainer_and_its_successor_is_told_of_them(model, volume, trainer, tmp_path):
    async with serving(trainer) as port, sampling(model, port, tmp_path) as client:
        pass
    first, second = Trainer(volume), Trainer(volume)
    async with sampling(model, port, tmp_path) as client:
        async with serving(first, port):
            first.announce(make_version(volume, model, RUN, 1))
            await until(lambda: first.heard("acknowledgement"))
        assert (await client.sample(version_ref(RUN, 1))).model.version == 1
        second.announce(make_version(volume, model, RUN, 2))
        async with serving(second, port):
            (ack,) = await until(lambda: second.heard("acknowledgement"))
            assert ack.version == 2
            (hello,) = second.heard("hello")
            assert [(held.run_id, held.version) for held in hello.held] == [(RUN, 1)]
            assert (await client.sample(version_ref(RUN))).model.version == 2


async def test_the_trainer_is_told_which_versions_are_taken_for_the_newest(model, volume, trainer, client):
    trainer.announce(make_version(volume, model, RUN, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    make_version(volume, model, RUN, 2)  # announced while the sampler does not watch
    assert (await client.sample(version_ref(RUN, 2))).model.version == 2
    trainer.restart("another")
    hello = (await until(lambda: trainer.heard("hello")[1:]))[0]
    assert [(held.version, held.newest) for held in hello.held] == [(1, True), (2, False)]


async def test_a_stream_ends_on_the_version_it_began_with_and_then_old_versions_go(model, volume, trainer, client):
    trainer.announce(make_version(volume, model, RUN, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    request = stream_request(version_ref(RUN), max_tokens=400)
    stream = client.stub.SampleStream(request, metadata=client.metadata)
    messages = [await stream.read()]
    for version in (2, 3, 4):
        trainer.announce(make_version(volume, model, RUN, version))
    messages += await _rest(stream)
    assert {message.model.version for message in messages} == {1}
    assert sum(len(message.tokens) for message in messages) == 400
    await until(lambda: len(trainer.heard("acknowledgement")) == 4)
    await until(lambda: {held.version for held in trainer.heard("release")} == {1, 2})
    assert sorted(await client.loaded()) == [3, 4]
    assert len(client.staged()) == 2


async def test_publishing_for_long_keeps_neither_versions_nor_files(model, volume, trainer, client):
    for version in range(1, 13):
        trainer.announce(make_version(volume, model, RUN, version))
    await until(lambda: len(trainer.heard("acknowledgement")) == 12)
    await until(lambda: len(trainer.heard("release")) == 10)
    assert sorted(await client.loaded()) == [11, 12]
    assert len(client.staged()) == 2


async def test_a_superseded_version_can_still_be_asked_for(model, volume, trainer, client):
    for version in (1, 2, 3):
        trainer.announce(make_version(volume, model, RUN, version))
    await until(lambda: trainer.heard("release"))
    assert (await client.sample(version_ref(RUN, 1))).model.version == 1


async def test_a_deleted_run_is_forgotten(model, volume, trainer, client):
    trainer.announce(make_version(volume, model, RUN, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    shutil.rmtree(volume.run(RUN))
    trainer.tell(weights_pb.WatchVersionsResponse(run_deleted=weights_pb.RunDeleted(run_id=RUN)))
    await until(lambda: trainer.heard("release"))
    with pytest.raises(errors.RunNotFound):
        await client.sample(version_ref(RUN))


async def test_load_and_unload(model, volume, client):
    make_version(volume, model, RUN, 1)
    load = pb.LoadVersionRequest(model=version_ref(RUN, 1))
    assert (await client.call("LoadVersion", load)).milliseconds > 0
    assert (await client.call("LoadVersion", load)).milliseconds == 0
    await client.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(RUN, 1)))
    await until(lambda: not client.staged())
    assert not await client.loaded()
    with pytest.raises(errors.VersionNotFound):
        await client.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(RUN, 1)))
    with pytest.raises(errors.InvalidArgument):
        await client.call("LoadVersion", pb.LoadVersionRequest(model=base_ref()))


async def test_lists_page_newest_first(model, volume, client):
    runs = [new_run_id() for _ in range(3)]
    for run_id in runs:
        make_version(volume, model, run_id, 1)
        await client.sample(version_ref(run_id, 1))
    first = await client.call("ListVersions", pb.ListVersionsRequest(page_size=2))
    rest = await client.call("ListVersions", pb.ListVersionsRequest(page_token=first.next_page_token))
    assert [version.model.run_id for version in (*first.versions, *rest.versions)] == runs[::-1]
    assert not rest.next_page_token
    (one,) = (await client.call("ListVersions", pb.ListVersionsRequest(run_id=runs[0]))).versions
    assert (one.model.run_id, one.requests_in_flight) == (runs[0], 0)
    with pytest.raises(errors.InvalidPageToken):
        await client.call("ListVersions", pb.ListVersionsRequest(page_token="?"))


async def _rest(stream):
    messages = []
    while (message := await stream.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages
