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
from sampler_service.stores.version import Version, VersionState, VersionTable
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
def table():
    return VersionTable()


@pytest.fixture
def evict(volume, memory, table):
    """Stage a version as if it had been streamed, and load and evict it as if there were an engine."""

    def evict(version: int, tenant: str = TENANT) -> Version:
        source = volume.version(RUN, version)
        manifest = read_manifest(source)
        manifest.tenant = tenant
        file = memory.allocate(manifest)
        shutil.copyfile(source / WEIGHTS_FILE, file)
        evicted = table.add(StagedAdapter(manifest, file.parent, temporary=True))
        for state in (VersionState.VERIFYING, VersionState.ACTIVE, VersionState.EVICTING):
            table.move(evicted, state)
        return evicted

    return evict


@pytest.fixture
def released(table):
    return Released(table)


class Released(list[int]):
    """The versions that were released."""

    def __init__(self, table: VersionTable) -> None:
        super().__init__()
        self._table = table

    async def __call__(self, version: Version) -> None:
        self._table.move(version, VersionState.RELEASED)
        await version.staged.discard()
        self.append(version.served.version)


async def test_it_waits_in_memory_until_it_is_written_and_on_disk_from_then_on(evict, table, released, scratch):
    tier, one = DiskTier(table, scratch, 2), evict(1)
    staged = one.staged.directory
    content = (staged / WEIGHTS_FILE).read_bytes()
    await tier.put(one, released)
    assert ([*tier], one.staged.directory) == ([one], staged)
    await tier.close()
    assert tier.take(one.key, TENANT) is one
    written = one.staged
    assert not written.in_memory
    assert not staged.exists()
    assert (written.directory / WEIGHTS_FILE).read_bytes() == content
    assert (written.directory / CONFIG_FILE).exists()
    await written.verified()
    assert not released


async def test_one_that_is_taken_back_before_it_is_written_comes_from_memory(evict, table, released, scratch, tmp_path):
    tier, one = DiskTier(table, scratch, 2), evict(1)
    staged = one.staged.directory
    await tier.put(one, released)
    assert tier.take(one.key, TENANT) is one
    await tier.close()
    assert one.staged.directory == staged
    assert (staged / WEIGHTS_FILE).exists()
    assert not list(tmp_path.glob(f"scratch/*/*/{WEIGHTS_FILE}"))
    assert not released
    await one.staged.verified()


async def test_one_that_has_to_go_before_it_is_written_leaves_nothing(evict, table, released, scratch, tmp_path):
    tier = DiskTier(table, scratch, 1)
    for version in (1, 2, 3):
        await tier.put(evict(version), released)
    await tier.close()
    assert released == [1, 2]
    assert len(list(tmp_path.glob(f"*/*/*/{WEIGHTS_FILE}"))) == len(tier) == 1


async def test_a_tenant_with_many_takes_no_place_from_one_with_few(evict, table, released, scratch):
    tier = DiskTier(table, scratch, 2)
    for version, tenant in ((1, "few"), (2, "many"), (3, "many"), (4, "many")):
        await tier.put(evict(version, tenant), released)
    await tier.close()
    assert released == [2, 3]
    assert [version.served.version for version in tier] == [1, 4]


async def test_one_that_cannot_be_written_goes(evict, table, released, scratch, tmp_path):
    tier, one = DiskTier(table, scratch, 2), evict(1)
    directory = next(tmp_path.glob("scratch/paceline-sampler-*"))
    shutil.rmtree(directory)
    directory.touch()
    await tier.put(one, released)
    await tier.close()
    assert released == [1]
    assert not len(tier)


async def test_one_that_a_full_disk_has_no_room_for_goes(evict, table, released, scratch, monkeypatch):
    def full(_):
        raise DiskFull("the scratch directory is full")

    monkeypatch.setattr(scratch, "allocate", full)
    tier, one = DiskTier(table, scratch, 2), evict(1)
    await tier.put(one, released)
    await tier.close()
    assert released == [1]
    assert not len(tier)


async def test_without_a_scratch_directory_none_waits(evict, table, released):
    tier, one = DiskTier(table, None, 2), evict(1)
    await tier.put(one, released)
    assert released == [1]
    assert not one.staged.directory.exists()
