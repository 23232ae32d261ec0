"""A sampler that can read the trainer's staging directory links versions instead of streaming them."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from blake3 import blake3
from support.stacks.sampler_stack import until, version_ref
from support.stacks.weight_stack import make_version

from paceline.layout import MANIFEST_FILE, WEIGHTS_FILE, new_run_id
from paceline.sampler.v1 import sampler_service_pb2 as pb

pytest_plugins = ["support.stacks.sampler_fixtures"]

RUN = new_run_id()


@pytest.fixture
def staged(tmp_path, trainer):
    """The trainer's staging directory, on the same file system as the sampler's."""
    trainer.shared = tmp_path / "trainer"
    trainer.shared.mkdir()
    return trainer.shared


def publish(trainer, volume, model, staged, version):
    """Make a version and stage it; return its manifest and the staged file."""
    manifest = make_version(volume, model, RUN, version)
    shutil.copytree(volume.version(RUN, version), staged / RUN / str(version))
    return manifest, staged / RUN / str(version) / WEIGHTS_FILE


async def test_a_staged_version_is_linked_verified_and_acknowledged(model, volume, trainer, staged, client):
    manifest, file = publish(trainer, volume, model, staged, 1)
    trainer.announce(manifest)
    (ack,) = await until(lambda: trainer.heard("acknowledgement"))
    assert ack.blake3 == blake3(file.read_bytes()).hexdigest()
    assert not trainer.fetched
    (directory,) = client.staged()
    assert (directory / WEIGHTS_FILE).samefile(file)
    linked, _ = await client.logprobs(version_ref(RUN, 1))
    shutil.rmtree(staged)
    assert (await client.logprobs(version_ref(RUN, 1)))[0] == linked


async def test_a_linked_version_answers_as_a_streamed_one(model, volume, trainer, staged, client):
    manifest, file = publish(trainer, volume, model, staged, 1)
    trainer.announce(manifest)
    await until(lambda: trainer.heard("acknowledgement"))
    linked, _ = await client.logprobs(version_ref(RUN, 1))
    await client.call("UnloadVersion", pb.UnloadVersionRequest(model=version_ref(RUN, 1)))
    await until(lambda: not client.staged())
    file.unlink()
    streamed, _ = await client.logprobs(version_ref(RUN, 1))
    assert trainer.fetched == ["1"]
    assert linked == streamed


async def test_damaged_staged_bytes_are_never_served(model, volume, trainer, staged, client):
    manifest, file = publish(trainer, volume, model, staged, 1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    trainer.announce(manifest)
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert (refusal.version, refusal.reason) == (1, "CHECKSUM_MISMATCH")
    assert not await client.loaded()
    assert not client.staged()


async def test_a_staged_file_with_other_tensors_is_refused_before_it_is_loaded(model, volume, trainer, staged, client):
    manifest, file = publish(trainer, volume, model, staged, 1)
    file.write_bytes(b"\xff" * 64)
    trainer.announce(manifest)
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert refusal.reason == "CHECKSUM_MISMATCH"
    assert not client.staged()


async def test_where_the_directory_is_not_shared_versions_are_streamed(model, volume, trainer, staged, client):
    staged.rmdir()
    for version in (1, 2):
        trainer.announce(make_version(volume, model, RUN, version))
        await until(lambda version=version: len(trainer.heard("acknowledgement")) == version)
    assert trainer.fetched == ["1", "2"]


async def test_an_offered_version_is_loaded_before_it_exists_and_answers_only_then(
    model, volume, trainer, staged, client
):
    manifest, file = publish(trainer, volume, model, staged, 1)
    trainer.offer(manifest, file)
    await until(lambda: client.metrics.get_sample_value("paceline_sampler_load_seconds_count"))
    asking = asyncio.create_task(client.sample(version_ref(RUN, 1)))
    assert not await client.loaded()
    assert not asking.done()
    trainer.announce(manifest)
    (ack,) = await until(lambda: trainer.heard("acknowledgement"))
    assert ack.blake3 == (await asking).model.blake3 == manifest.model.blake3
    assert not trainer.fetched


async def test_offers_of_a_trainer_that_is_gone_are_given_up(model, volume, trainer, staged, client):
    manifest, file = publish(trainer, volume, model, staged, 1)
    trainer.offer(manifest, file)
    await until(lambda: client.metrics.get_sample_value("paceline_sampler_load_seconds_count"))
    trainer.announced.clear()
    trainer.hang_up()
    await until(lambda: not client.staged())
    assert not await client.loaded()


async def test_an_offer_of_damaged_bytes_is_never_served(model, volume, trainer, staged, client):
    manifest, file = publish(trainer, volume, model, staged, 1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    trainer.offer(manifest, file)
    trainer.announce(manifest)
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert (refusal.version, refusal.reason) == (1, "CHECKSUM_MISMATCH")
    assert not await client.loaded()
    assert not client.staged()


async def test_an_offer_that_a_newer_one_supersedes_is_given_up(model, volume, trainer, staged, client):
    first, file = publish(trainer, volume, model, staged, 1)
    (volume.version(RUN, 1) / MANIFEST_FILE).unlink()
    second, newer = publish(trainer, volume, model, staged, 2)
    trainer.offer(first, file)
    trainer.offer(second, newer)
    trainer.announce(second)
    (ack,) = await until(lambda: trainer.heard("acknowledgement"))
    assert ack.version == 2
    await until(lambda: len(client.staged()) == 1)
    assert list(await client.loaded()) == [2]


async def test_an_offer_that_cannot_be_linked_comes_as_a_stream_once_it_exists(model, volume, trainer, staged, client):
    manifest, file = publish(trainer, volume, model, staged, 1)
    trainer.offer(manifest, file.parents[3] / "elsewhere" / RUN / "1" / WEIGHTS_FILE)
    trainer.announce(manifest)
    (ack,) = await until(lambda: trainer.heard("acknowledgement"))
    assert ack.blake3 == manifest.model.blake3
    assert trainer.fetched == ["1"]
