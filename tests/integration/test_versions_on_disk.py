"""Versions that no longer fit into memory are kept on disk and loaded from there."""

from __future__ import annotations

import asyncio

import pytest
from support.stacks.sampler_stack import sampling, until, version_ref
from support.stacks.weight_stack import make_version

from paceline import errors
from paceline.layout import WEIGHTS_FILE, new_run_id
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.weights.v1 import weight_service_pb2 as weights_pb

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


@pytest.fixture
async def client(model, port, tmp_path):
    limits = {"max_active_versions": 1, "max_loaded_versions": 1, "max_disk_versions": 2}
    async with sampling(model, port, tmp_path, scratch_dir=tmp_path / "scratch", **limits) as sampler:
        yield sampler


@pytest.fixture
def on_disk(tmp_path):
    return lambda: list(tmp_path.glob(f"scratch/paceline-sampler-*/*/{WEIGHTS_FILE}"))


async def written(client, on_disk, count):
    """Wait until `count` versions are on disk only, and one is in memory."""
    await until(lambda: (len(on_disk()), len(client.staged())) == (count, 1))


async def ask(client, versions, run_id=RUN):
    return [(await client.logprobs(version_ref(run_id, version)))[0] for version in versions]


async def test_they_come_back_without_the_trainer_and_the_trainer_keeps_them(model, volume, trainer, client, on_disk):
    for version in (1, 2, 3):
        make_version(volume, model, RUN, version)
    first = await ask(client, (1, 2, 3))
    await written(client, on_disk, 2)
    assert await ask(client, (1, 2, 3)) == first
    assert trainer.fetched == ["1", "2", "3"]
    assert {ack.version for ack in trainer.heard("acknowledgement")} == {1, 2, 3}
    assert not trainer.heard("release")


async def test_when_the_disk_is_full_the_one_that_came_first_goes(model, volume, trainer, client, on_disk):
    for version in (1, 2, 3, 4):
        make_version(volume, model, RUN, version)
    await ask(client, (1, 2, 3, 4))
    await until(lambda: [released.version for released in trainer.heard("release")] == [1])
    await written(client, on_disk, 2)
    assert (client.metric("versions_on_disk"), client.metric("versions_loaded")) == (2, 1)
    assert client.metric("versions_on_disk_bytes") == sum(path.stat().st_size for path in on_disk())
    await ask(client, (1,))
    assert trainer.fetched == ["1", "2", "3", "4", "1"]


async def test_one_that_is_damaged_there_is_fetched_again(model, volume, trainer, client, on_disk):
    for version in (1, 2):
        make_version(volume, model, RUN, version)
    first = await ask(client, (1, 2))
    await written(client, on_disk, 1)
    (file,) = on_disk()
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert await ask(client, (1, 2)) == first
    assert trainer.fetched == ["1", "2", "1"]


async def test_they_are_as_absent_for_strangers_as_all_others(model, volume, client, on_disk):
    for version in (1, 2):
        make_version(volume, model, RUN, version)
    await ask(client, (1, 2))
    await written(client, on_disk, 1)
    stranger = client.be("stranger")
    with pytest.raises(errors.RunNotFound):
        await stranger.sample(version_ref(RUN, 1))
    with pytest.raises(errors.VersionNotFound):
        await stranger.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(RUN, 1)))
    assert len(on_disk()) == 1


async def test_they_go_when_they_are_told_to_or_superseded_or_their_run_is_deleted(
    model, volume, trainer, client, on_disk
):
    other = new_run_id()
    for run_id, version in ((RUN, 1), (RUN, 2), (other, 1)):
        make_version(volume, model, run_id, version)
        await ask(client, (version,), run_id)
    await written(client, on_disk, 2)
    await client.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(RUN, 2)))
    await until(lambda: len(on_disk()) == 1)
    for version in (3, 4):
        trainer.announce(make_version(volume, model, RUN, version))
    await until(lambda: 1 in [released.version for released in trainer.heard("release") if released.run_id == RUN])
    for run_id in (RUN, other):
        trainer.tell(weights_pb.WatchVersionsResponse(run_deleted=weights_pb.RunDeleted(run_id=run_id)))
    await until(lambda: not on_disk())


async def test_a_watch_that_is_opened_again_names_them_too(model, volume, trainer, client):
    for version in (1, 2):
        make_version(volume, model, RUN, version)
    await ask(client, (1, 2))
    trainer.outboxes[0].put_nowait(None)  # breaks the watch
    hello = await until(lambda: trainer.heard("hello")[1:])
    assert {(held.run_id, held.version) for held in hello[0].held} == {(RUN, 1), (RUN, 2)}


async def test_those_of_the_volume_stay_where_they_are(model, volume, trainer, port, tmp_path):
    for version in (1, 2):
        make_version(volume, model, RUN, version)
    async with sampling(model, port, tmp_path, bridge="volume", max_active_versions=1, max_loaded_versions=1) as client:
        first = await ask(client, (1, 2))
        assert client.metric("versions_on_disk") == 1
        assert await ask(client, (1, 2)) == first
        assert not trainer.heard("release")
    assert (volume.version(RUN, 1) / WEIGHTS_FILE).exists()


async def test_concurrent_requests_share_the_way_back(model, volume, trainer, client):
    for version in (1, 2):
        make_version(volume, model, RUN, version)
    await ask(client, (1, 2))
    answers = await asyncio.gather(*(client.sample(version_ref(RUN, 1)) for _ in range(8)))
    assert {answer.model.version for answer in answers} == {1}
    assert trainer.fetched == ["1", "2"]
