"""Different content under a known version number, numbers that others pushed, and samplers without a free slot."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from support.stacks.sampler_stack import sampling, stream_request, until, version_ref
from support.stacks.weight_stack import Trainer, chunks_of, make_version, serving

from paceline import errors
from paceline.layout import WEIGHTS_FILE, Volume, new_run_id
from paceline.rpc.identity import PEER_TENANT
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.weights.v1 import weight_service_pb2 as weights_pb

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


def welcome(trainer, instance):
    trainer.tell(weights_pb.WatchVersionsResponse(welcome=weights_pb.Welcome(trainer_instance=instance)))


def publish(trainer, model, version, seed=None, run_id=RUN):
    """Replace any version with this number by a new one, and announce it."""
    volume = trainer.volume
    shutil.rmtree(volume.version(run_id, version), ignore_errors=True)
    manifest = make_version(volume, model, run_id, version, seed=version if seed is None else seed)
    trainer.announce(manifest)
    return manifest


async def acknowledged(trainer, manifest):
    await until(lambda: manifest.model.blake3 in {ack.blake3 for ack in trainer.heard("acknowledgement")})


async def push(client, manifest, weights):
    parts = [pb.UpdateWeightsRequest(manifest=manifest)]
    parts += [pb.UpdateWeightsRequest(chunk=chunk) for chunk in chunks_of(weights)]
    parts.append(pb.UpdateWeightsRequest(commit=pb.Commit(blake3=manifest.model.blake3)))
    return await client.call("UpdateWeights", iter(parts))


@pytest.mark.parametrize("keep", ["loaded", "on disk"])
async def test_the_trainers_content_takes_the_place_of_what_had_its_number(model, port, trainer, tmp_path, keep):
    scratch = (
        {"scratch_dir": tmp_path / "scratch", "max_loaded_versions": 1, "max_active_versions": 1}
        if keep == "on disk"
        else {}
    )
    async with sampling(model, port, tmp_path, **scratch) as client:
        before = publish(trainer, model, 1)
        await acknowledged(trainer, before)
        if keep == "on disk":
            await acknowledged(trainer, publish(trainer, model, 1, run_id=new_run_id()))
        after = publish(trainer, model, 1, seed=99)
        await acknowledged(trainer, after)
        assert (await client.sample(version_ref(RUN, 1))).model.blake3 == after.model.blake3 != before.model.blake3


async def test_requests_in_progress_end_on_what_they_began_with(model, trainer, client):
    before = publish(trainer, model, 1)
    await acknowledged(trainer, before)
    stream = client.stub.SampleStream(stream_request(version_ref(RUN), max_tokens=400), metadata=client.metadata)
    messages = [await stream.read()]
    after = publish(trainer, model, 1, seed=99)
    await acknowledged(trainer, after)
    assert (await client.sample(version_ref(RUN))).model.blake3 == after.model.blake3
    while message := await stream.read():
        messages.append(message)
    assert {message.model.blake3 for message in messages} == {before.model.blake3}
    await until(lambda: _one_directory(client))
    assert not trainer.heard("release"), "version 1 is held all the time"


async def test_what_is_still_loaded_when_other_content_is_announced_does_not_keep_that_out(
    model, trainer, client, monkeypatch
):
    older = make_version(trainer.volume, model, RUN, 1)
    loads, gate, load = [], asyncio.Event(), client.engine.add_adapter

    async def load_later(adapter):
        loads.append(adapter)
        await gate.wait()
        return await load(adapter)

    monkeypatch.setattr(client.engine, "add_adapter", load_later)
    asked = asyncio.create_task(client.sample(version_ref(RUN, 1)))
    await until(lambda: loads)
    newer = publish(trainer, model, 1, seed=99)
    await until(lambda: len(client.staged()) == 2)
    gate.set()
    assert (await asked).model.blake3 in {older.model.blake3, newer.model.blake3}
    await acknowledged(trainer, newer)
    assert not trainer.heard("refusal")


async def _one_directory(client):
    return len(client.staged()) == 1


async def test_what_is_unloaded_and_published_anew_is_never_acknowledged_as_the_new_one(model, trainer, client):
    outside = Volume(trainer.volume.root.parent / "outside")
    pushed = make_version(outside, model, RUN, 2, seed=50)
    await push(client.be(PEER_TENANT), pushed, outside.version(RUN, 2) / WEIGHTS_FILE)
    announced = publish(trainer, model, 2)
    await acknowledged(trainer, announced)
    assert (await client.sample(version_ref(RUN, 2))).model.blake3 == announced.model.blake3
    with pytest.raises(errors.VersionExists):
        await push(client.be(PEER_TENANT), pushed, outside.version(RUN, 2) / WEIGHTS_FILE)


async def test_bytes_that_are_not_the_announced_ones_are_refused(model, trainer, client):
    manifest = make_version(trainer.volume, model, RUN, 1)
    manifest.model.blake3 = "0" * 64
    trainer.announce(manifest)
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert (refusal.reason, refusal.pending) == ("CHECKSUM_MISMATCH", False)
    assert refusal.message
    assert not await client.loaded()


async def test_a_number_from_elsewhere_is_the_newest_only_until_the_trainers_next(model, trainer, client):
    await acknowledged(trainer, publish(trainer, model, 1))
    outside = Volume(trainer.volume.root.parent / "outside")
    high = 2**31 - 1
    manifest = make_version(outside, model, RUN, high, seed=50)
    await push(client.be(PEER_TENANT), manifest, outside.version(RUN, high) / WEIGHTS_FILE)
    assert (await client.sample(version_ref(RUN))).model.version == high
    for version in (2, 3):
        await acknowledged(trainer, publish(trainer, model, version))
        assert (await client.sample(version_ref(RUN))).model.version == version
    assert sorted(await client.loaded()) == [2, 3]


async def test_a_trainer_on_a_restored_volume_says_what_is_newest(model, volume, trainer, tmp_path):
    async with serving(trainer) as port, sampling(model, port, tmp_path) as client:
        welcome(trainer, "before")
        for version in (1, 2, 3):
            await acknowledged(trainer, publish(trainer, model, version))
    restored = Trainer(Volume(tmp_path / "restored"))
    async with sampling(model, port, tmp_path) as client:
        async with serving(trainer, port):
            await until(lambda: trainer.outboxes)
            await until(lambda: _newest_is(client, 3))
        welcome(restored, "after")
        publish(restored, model, 2)
        async with serving(restored, port):
            await until(lambda: restored.heard("acknowledgement"))
            assert (await client.sample(version_ref(RUN))).model.version == 2


async def _newest_is(client, version):
    return (await client.sample(version_ref(RUN))).model.version == version


async def test_a_sampler_without_room_says_so_and_loads_the_version_when_there_is(model, port, trainer, tmp_path):
    async with sampling(model, port, tmp_path, max_loaded_versions=1, max_active_versions=1) as client:
        await acknowledged(trainer, publish(trainer, model, 1))
        request = stream_request(version_ref(RUN, 1), max_tokens=480)
        stream = client.stub.SampleStream(request, metadata=client.metadata)
        await stream.read()
        other = publish(trainer, model, 1, seed=9, run_id=new_run_id())
        refusal = await until(lambda: next(iter(trainer.heard("refusal")), None))
        assert (refusal.reason, refusal.pending) == ("OVERLOADED", True)
        assert other.model.run_id not in trainer.fetched
        stream.cancel()
        await acknowledged(trainer, other)


async def test_a_version_that_a_newer_one_overtakes_while_there_is_no_room_is_given_up(model, port, trainer, tmp_path):
    async with sampling(model, port, tmp_path, max_loaded_versions=1, max_active_versions=1) as client:
        await acknowledged(trainer, publish(trainer, model, 1))
        stream = client.stub.SampleStream(stream_request(version_ref(RUN, 1), max_tokens=480), metadata=client.metadata)
        await stream.read()
        run_id = new_run_id()
        publish(trainer, model, 1, run_id=run_id)
        await until(lambda: trainer.heard("refusal"))
        newer = publish(trainer, model, 2, run_id=run_id)
        last = await until(lambda: [one for one in trainer.heard("refusal") if not one.pending])
        assert (last[0].version, last[0].reason) == (1, "ENGINE_UNAVAILABLE")
        stream.cancel()
        await acknowledged(trainer, newer)
