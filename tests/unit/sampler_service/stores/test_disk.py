"""Where a version waits while its files move from memory to disk."""

from __future__ import annotations

import shutil

import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.weight_stack import BASE, TENANT, make_version

from paceline.errors import DiskFull
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE, Volume, new_run_id
from paceline.weights import read_manifest
from sampler_service.stores.disk import DiskTier
from sampler_service.transports.base import StagedAdapter
from sampler_service.transports.staging import StagingArea

RUN = new_run_id()


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / BASE)
    volume = Volume(tmp_path_factory.mktemp("volume"))
    for version in (1, 2, 3, 4):
        make_version(volume, model, RUN, version)
    return volume


@pytest.fixture
def memory(tmp_path):
    area = StagingArea(tmp_path / "memory")
    yield area
    area.close()


@pytest.fixture
def scratch(tmp_path):
    area = StagingArea(tmp_path / "scratch")
    yield area
    area.close()


@pytest.fixture
def stage(volume, memory):
    """Stage a version as if it had been streamed."""

    def stage(version: int, tenant: str = TENANT) -> StagedAdapter:
        source = volume.version(RUN, version)
        manifest = read_manifest(source)
        manifest.tenant = tenant
        file = memory.allocate(manifest)
        shutil.copyfile(source / WEIGHTS_FILE, file)
        return StagedAdapter(manifest, file.parent, temporary=True)

    return stage


class Released(list[int]):
    """The versions that were released."""

    async def __call__(self, staged: StagedAdapter) -> None:
        await staged.discard()
        self.append(staged.manifest.model.version)


async def test_it_waits_in_memory_until_it_is_written_and_on_disk_from_then_on(stage, scratch):
    tier, one, released = DiskTier(scratch, 2), stage(1), Released()
    content = (one.directory / WEIGHTS_FILE).read_bytes()
    await tier.put(one, released)
    assert tier.find(one.key) is one
    await tier.close()
    written = tier.take(one.key, TENANT)
    assert not written.in_memory
    assert not one.directory.exists()
    assert (written.directory / WEIGHTS_FILE).read_bytes() == content
    assert (written.directory / CONFIG_FILE).exists()
    await written.verified()
    assert not released


async def test_one_that_is_taken_back_before_it_is_written_comes_from_memory(stage, scratch, tmp_path):
    tier, one, released = DiskTier(scratch, 2), stage(1), Released()
    await tier.put(one, released)
    taken = tier.take(one.key, TENANT)
    await tier.close()
    assert taken.directory == one.directory
    assert (one.directory / WEIGHTS_FILE).exists()
    assert not list(tmp_path.glob(f"scratch/*/*/{WEIGHTS_FILE}"))
    assert not released
    await taken.verified()


async def test_one_that_has_to_go_before_it_is_written_leaves_nothing(stage, scratch, tmp_path):
    tier, released = DiskTier(scratch, 1), Released()
    for version in (1, 2, 3):
        await tier.put(stage(version), released)
    await tier.close()
    assert released == [1, 2]
    assert len(list(tmp_path.glob(f"*/*/*/{WEIGHTS_FILE}"))) == len(tier) == 1


async def test_a_tenant_with_many_takes_no_place_from_one_with_few(stage, scratch):
    tier, released = DiskTier(scratch, 2), Released()
    for version, tenant in ((1, "few"), (2, "many"), (3, "many"), (4, "many")):
        await tier.put(stage(version, tenant), released)
    await tier.close()
    assert released == [2, 3]
    assert [staged.served.version for staged in tier] == [1, 4]


async def test_one_that_cannot_be_written_goes(stage, scratch, tmp_path):
    tier, one, released = DiskTier(scratch, 2), stage(1), Released()
    directory = next(tmp_path.glob("scratch/paceline-sampler-*"))
    shutil.rmtree(directory)
    directory.touch()
    await tier.put(one, released)
    await tier.close()
    assert released == [1]
    assert not tier


async def test_one_that_a_full_disk_has_no_room_for_goes(stage, scratch, monkeypatch):
    def full(_):
        raise DiskFull("the scratch directory is full")

    monkeypatch.setattr(scratch, "allocate", full)
    tier, one, released = DiskTier(scratch, 2), stage(1), Released()
    await tier.put(one, released)
    await tier.close()
    assert released == [1]
    assert not tier


async def test_without_a_scratch_directory_none_waits(stage):
    tier, one, released = DiskTier(None, 2), stage(1), Released()
    await tier.put(one, released)
    assert released == [1]
    assert not one.directory.exists()
