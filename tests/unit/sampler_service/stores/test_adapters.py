"""Which versions stay in the engine, and for how long: a real engine, adapters on a real volume."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.models.tiny_models import make_tiny_llama
from support.stacks.sampler_stack import PROMPT, until
from support.stacks.weight_stack import BASE, TENANT, make_checkpoint, make_version

from paceline import errors
from paceline.layout import WEIGHTS_FILE, CheckpointPath, Volume, new_run_id
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import PEER_TENANT
from paceline.types import ModelRef, ServedModel
from paceline.weights import read_manifest
from sampler_service.engine.hf.engine import HfEngine
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import Adapter, LoadTimes
from sampler_service.metrics import SamplerMetrics
from sampler_service.stores.adapters import VersionRegistry
from sampler_service.stores.base import VersionResolver
from sampler_service.stores.disk import DiskTier
from sampler_service.stores.places import RegistryLimits
from sampler_service.stores.version import VersionTable
from sampler_service.transports.base import ManifestRules, StagedAdapter, VersionKey
from sampler_service.transports.trainer_link import TrainerLink
from sampler_service.transports.volume import VolumeBridge

RUN = new_run_id()


class GatedBridge(VolumeBridge):
    """Reads the volume when the gate is open, and counts the fetches. With `staging`, files are copied there."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.fetches = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.before_load: Callable[[], None] = int
        """Called after files are verified and before they are loaded."""
        self.staging: Path | None = None

    async def fetch(self, ref: ModelRef, tenant: str) -> StagedAdapter:
        self.fetches += 1
        await self.gate.wait()
        staged = await super().fetch(ref, tenant)
        if self.staging is not None:
            staged = copied(staged, self.staging / str(self.fetches))
        self.before_load()
        return staged


def copied(staged: StagedAdapter, directory: Path) -> StagedAdapter:
    """Return a version as if it had been received: in a directory of the sampler's own."""
    return StagedAdapter(staged.manifest, shutil.copytree(staged.directory, directory), temporary=True)


class GatedEngine(HfEngine):
    """Removes adapters when the gate is open, knows those that it has, and can be as good as dead."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.gate = asyncio.Event()
        self.gate.set()
        self.adapters: set[str] = set()
        self.dies_after_load = False
        self.found_dead = asyncio.Event()

    async def check_health(self) -> None:
        await super().check_health()
        if self.adapters and self.dies_after_load:
            self.found_dead.set()
            raise errors.EngineUnavailable("the engine died; it is restarting")

    async def add_adapter(self, adapter: Adapter) -> LoadTimes:
        times = await super().add_adapter(adapter)
        self.adapters.add(adapter.name)
        return times

    async def remove_adapter(self, adapter: Adapter) -> None:
        await self.gate.wait()
        await super().remove_adapter(adapter)
        self.adapters.discard(adapter.name)


@dataclass
class Setup:
    """A registry and its dependencies."""

    model: Path
    volume: Volume
    engine: GatedEngine
    bridge: GatedBridge
    resolver: VersionResolver
    metrics: SamplerMetrics
    stack: AsyncExitStack
    disk: DiskTier = field(init=False)
    """That of the registry made last."""

    def registry(
        self, max_loaded: int = 4, keep: int = 2, seconds: float = 60, on_disk: int = 0, per_tenant: int = 0
    ) -> VersionRegistry:
        limits = RegistryLimits(max_loaded, keep, seconds, per_tenant)
        self.disk = DiskTier(VersionTable(), None, on_disk)
        registry = VersionRegistry(self.engine, self.bridge, self.resolver, BASE, limits, self.metrics, self.disk)
        self.stack.push_async_callback(registry.close)
        return registry

    def publish(self, version: int, run_id: str = RUN, **options) -> ModelRef:
        make_version(self.volume, self.model, run_id, version, **options)
        return ModelRef(run_id=run_id, version=version)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model") / BASE)


@pytest.fixture
async def setup(model, tmp_path):
    async with AsyncExitStack() as stack:
        engine = GatedEngine(EngineOptions(model, BASE, "float32", max_lora_rank=8))
        await engine.start()
        stack.push_async_callback(engine.stop)
        channel = await stack.enter_async_context(open_channel(f"unix:{tmp_path / 'nobody.sock'}"))
        volume = Volume(tmp_path / "volume")
        bridge = GatedBridge(volume, TrainerLink(channel, "", 5), ManifestRules(BASE, 8, 1 << 30))
        metrics = SamplerMetrics(CollectorRegistry())
        yield Setup(model, volume, engine, bridge, VersionResolver(bridge), metrics, stack)


def loaded(registry):
    return sorted(entry.served.version for entry in registry)


async def use(registry, ref, tenant=TENANT):
    async with registry.lease(ref, tenant) as lease:
        return lease


async def test_the_base_model_needs_no_adapter(setup):
    lease = await use(setup.registry(), ModelRef())
    assert (lease.adapter, lease.served) == (None, ServedModel(BASE))


async def test_a_version_in_use_stays_however_old_it_is_and_goes_with_its_last_request(setup):
    registry = setup.registry(max_loaded=2, keep=1)
    gone = []
    registry.listeners.released.append(gone.append)
    old, new = setup.publish(1), setup.publish(2)
    async with registry.lease(old, TENANT) as first:
        async with registry.lease(old, TENANT):
            await use(registry, new)
            registry.retire_superseded(RUN)
        assert loaded(registry) == [1, 2]
        logprobs = await setup.engine.compute_logprobs(PROMPT, first.adapter, TENANT)
        assert len(logprobs) == len(PROMPT)
    await until(lambda: gone)
    assert loaded(registry) == [2]
    assert [served.version for served in gone] == [1]
    with pytest.raises(errors.VersionNotFound):
        await setup.engine.compute_logprobs(PROMPT, first.adapter, TENANT)


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 1, 3, 2)])
async def test_the_newest_versions_of_a_run_stay_in_whatever_order_they_came(setup, order):
    registry = setup.registry(max_loaded=8)
    for version in order:
        await use(registry, setup.publish(version))
        registry.retire_superseded(RUN)
    await until(lambda: loaded(registry) == [3, 4])


async def test_when_full_the_version_used_longest_ago_goes(setup):
    registry = setup.registry(max_loaded=2)
    runs = [new_run_id() for _ in range(3)]
    first, second, third = (setup.publish(1, run_id) for run_id in runs)
    await use(registry, first)
    await use(registry, second)
    await use(registry, first)
    await use(registry, third)
    assert [entry.served.run_id for entry in registry] == [runs[0], runs[2]]


async def test_a_load_waits_for_one_that_leaves_only_where_no_slot_is_free_beside_it(setup):
    registry = setup.registry(max_loaded=2)
    first, second, third = (setup.publish(version) for version in (1, 2, 3))
    await use(registry, first)
    setup.engine.gate.clear()
    registry.unload(first, TENANT)
    await use(registry, second)
    assert loaded(registry) == [2]
    waiting = asyncio.create_task(use(registry, third))
    await until(lambda: setup.bridge.fetches == 3)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    setup.engine.gate.set()
    await waiting
    assert loaded(registry) == [2, 3]


async def test_when_all_that_fit_are_in_use_another_is_refused(setup):
    registry = setup.registry(max_loaded=1)
    first, second = setup.publish(1), setup.publish(1, new_run_id())
    async with registry.lease(first, TENANT):
        with pytest.raises(errors.Overloaded):
            await use(registry, second)
    assert (await use(registry, second)).served.run_id == second.run_id


async def load_many(setup, registry, tenant, count):
    for _ in range(count):
        await use(registry, setup.publish(1, new_run_id(), tenant=tenant), tenant)


def held_by(registry):
    return Counter(entry.tenant for entry in registry)


async def test_a_tenant_alone_may_load_all_that_fit_and_no_more_than_its_share_beside_others(setup):
    registry = setup.registry(max_loaded=6)
    await load_many(setup, registry, "anquetil", 8)
    assert held_by(registry) == {"anquetil": 6}
    await load_many(setup, registry, "bartali", 2)
    assert held_by(registry) == {"anquetil": 4, "bartali": 2}
    await load_many(setup, registry, "coppi", 18)
    assert held_by(registry) == {"anquetil": 2, "bartali": 2, "coppi": 2}


async def test_a_version_within_its_tenants_share_stays_while_another_loads_many(setup):
    registry = setup.registry(max_loaded=4)
    mine = setup.publish(1, tenant="anquetil")
    adapter = (await use(registry, mine, "anquetil")).adapter
    await load_many(setup, registry, "coppi", 9)
    assert held_by(registry) == {"anquetil": 1, "coppi": 3}
    assert (await use(registry, mine, "anquetil")).adapter is adapter


async def test_who_has_its_share_in_use_is_refused_and_takes_nobodys(setup):
    registry = setup.registry(max_loaded=2)
    await load_many(setup, registry, "anquetil", 1)
    mine = setup.publish(1, tenant="coppi")
    async with registry.lease(mine, "coppi"):
        with pytest.raises(errors.Overloaded, match="its share") as refused:
            await load_many(setup, registry, "coppi", 1)
        assert refused.value.retry_after
    assert held_by(registry) == {"anquetil": 1, "coppi": 1}


async def test_a_tenants_own_limit_holds_where_slots_are_free(setup):
    registry = setup.registry(max_loaded=4, per_tenant=1)
    first, second = (setup.publish(1, new_run_id(), tenant="coppi") for _ in range(2))
    async with registry.lease(first, "coppi"):
        with pytest.raises(errors.QuotaExceeded) as refused:
            await use(registry, second, "coppi")
        assert refused.value.metadata == {"quota": "versions", "used": "1", "limit": "1"}
        assert refused.value.retry_after
    await use(registry, second, "coppi")
    await load_many(setup, registry, "anquetil", 1)
    assert held_by(registry) == {"coppi": 1, "anquetil": 1}


async def test_what_comes_back_has_a_new_id_and_a_new_name(setup):
    registry = setup.registry(max_loaded=1)
    first, second = setup.publish(1), setup.publish(1, new_run_id())
    adapters = [(await use(registry, ref)).adapter for ref in (first, second, first)]
    assert [adapter.adapter_id for adapter in adapters] == [1, 2, 3]
    assert len({adapter.name for adapter in adapters}) == 3
    assert adapters[0].name.startswith(f"{TENANT}/{RUN}/1/")


async def test_waiters_share_one_fetch_which_goes_on_when_one_of_them_leaves(setup):
    registry = setup.registry()
    ref = setup.publish(1)
    setup.bridge.gate.clear()
    waiting = [asyncio.create_task(use(registry, ref)) for _ in range(5)]
    await until(lambda: setup.bridge.fetches)
    waiting[0].cancel()
    setup.bridge.gate.set()
    leases = await asyncio.gather(*waiting[1:])
    assert {lease.adapter.adapter_id for lease in leases} == {1}
    assert setup.bridge.fetches == 1


async def test_loading_time_is_told_and_nothing_when_it_was_there(setup):
    registry = setup.registry()
    ref = setup.publish(1)
    assert (await use(registry, ref)).load_milliseconds > 0
    assert (await use(registry, ref)).load_milliseconds == 0


async def test_a_version_that_is_verified_while_the_engine_is_dead_is_active_only_once_it_is_back(setup):
    registry = setup.registry()
    active = []
    registry.listeners.loaded.append(active.append)
    ref = setup.publish(1)
    setup.engine.dies_after_load = True
    fetching = asyncio.create_task(registry.fetch(VersionKey(ref.run_id, ref.version)))
    await until(lambda: fetching.done() or setup.engine.found_dead.is_set())
    assert not active
    assert not loaded(registry)
    setup.engine.dies_after_load = False
    assert await fetching in registry
    assert active


async def test_a_version_that_does_not_come_in_time_is_an_error(setup):
    registry = setup.registry(seconds=0.05)
    ref = setup.publish(1)
    setup.bridge.gate.clear()
    with pytest.raises(errors.TrainerUnavailable):
        await use(registry, ref)


async def test_only_the_owner_and_services_may_use_a_version(setup):
    registry = setup.registry()
    ref = setup.publish(1)
    for _ in range(2):  # not loaded, then loaded
        with pytest.raises(errors.RunNotFound) as failure:
            await use(registry, ref, "stranger")
        assert str(failure.value).startswith(f"model.version.run_id: no such run: {ref.run_id}; ")
        assert (await use(registry, ref, PEER_TENANT)).served.version == 1
    with pytest.raises(errors.VersionNotFound):
        registry.unload(ref, "stranger")


async def test_the_owner_does_not_inherit_a_strangers_refusal(setup):
    registry = setup.registry()
    ref = setup.publish(1)
    setup.bridge.gate.clear()
    stranger = asyncio.create_task(use(registry, ref, "stranger"))
    await until(lambda: setup.bridge.fetches)
    owner = asyncio.create_task(use(registry, ref))
    await until(lambda: setup.bridge.fetches == 2)
    setup.bridge.gate.set()
    assert (await owner).served.version == 1
    with pytest.raises(errors.RunNotFound):
        await stranger


async def test_the_same_version_with_other_content_is_refused_and_the_first_stays(setup, tmp_path):
    registry = setup.registry()
    ref = setup.publish(1)
    blake3 = (await use(registry, ref)).served.blake3
    other = Volume(tmp_path / "other")
    manifest = make_version(other, setup.model, RUN, 1, seed=77)
    with pytest.raises(errors.VersionExists):
        pushed = StagedAdapter(manifest, other.version(RUN, 1), temporary=True)
        await registry.install(pushed, registry.arrivals.expect(RUN))
    assert not other.version(RUN, 1).exists()
    assert registry.find(VersionKey(RUN, 1)).served.blake3 == blake3


async def test_what_the_engine_refuses_is_not_loaded_and_leaves_no_files(setup, tmp_path):
    registry = setup.registry()
    other = Volume(tmp_path / "other")
    manifest = make_version(other, setup.model, RUN, 1, rank=16)
    with pytest.raises(errors.RankTooLarge):
        pushed = StagedAdapter(manifest, other.version(RUN, 1), temporary=True)
        await registry.install(pushed, registry.arrivals.expect(RUN))
    assert not len(registry)
    assert not other.version(RUN, 1).exists()


async def test_unloading_waits_for_requests(setup):
    registry = setup.registry()
    ref = setup.publish(1)
    async with registry.lease(ref, TENANT):
        registry.unload(ref, TENANT)
        await asyncio.sleep(0)
        assert loaded(registry) == [1]
    await until(lambda: not len(registry))
    with pytest.raises(errors.VersionNotFound):
        registry.unload(ref, TENANT)


async def test_forgetting_a_run_takes_its_versions_and_checkpoints(setup):
    registry = setup.registry()
    other = setup.publish(1, new_run_id())
    path = f"paceline://{RUN}/sampler/best"
    make_checkpoint(setup.volume, setup.model, path, seed=1)
    for ref in (setup.publish(1), ModelRef(checkpoint=path), other):
        await use(registry, ref)
    registry.forget_run(RUN)
    await until(lambda: len(registry) == 1)
    assert [entry.served.run_id for entry in registry] == [other.run_id]


async def test_what_arrives_of_a_run_after_its_deletion_is_refused(setup):
    registry = setup.registry()
    for ref in (setup.publish(1), ModelRef(checkpoint=f"paceline://{RUN}/sampler/best")):
        if ref.checkpoint:
            make_checkpoint(setup.volume, setup.model, ref.checkpoint, seed=1)
        setup.bridge.gate.clear()
        using = asyncio.create_task(use(registry, ref))
        await until(lambda: setup.bridge.fetches)
        registry.forget_run(RUN)
        setup.bridge.gate.set()
        with pytest.raises(errors.RunNotFound):
            await using
        assert not len(registry)
        setup.bridge.fetches = 0
    assert (await use(registry, setup.publish(1, new_run_id()))).served.version == 1


@pytest.mark.parametrize("per_tenant", [0, 1])
async def test_a_version_that_waits_on_disk_waits_on_when_there_is_no_room_for_it(setup, tmp_path, per_tenant):
    registry = setup.registry(max_loaded=1 + per_tenant, per_tenant=per_tenant, keep=8, on_disk=8)
    released = []
    registry.listeners.released.append(released.append)
    pushed, sent, other = setup.publish(1), tmp_path / "sent", setup.publish(2)
    setup.volume.version(RUN, 1).rename(sent)  # no trainer has it
    await registry.install(StagedAdapter(read_manifest(sent), sent, True, on_disk=True), registry.arrivals.expect(RUN))
    async with registry.lease(other, TENANT):
        with pytest.raises(errors.QuotaExceeded if per_tenant else errors.Overloaded):
            await use(registry, pushed)
    assert not released
    assert (await use(registry, pushed)).served.version == 1


async def test_a_version_that_is_loaded_from_disk_is_held_meanwhile(setup, monkeypatch):
    registry, add_adapter, held = setup.registry(max_loaded=1, keep=8, on_disk=8), setup.engine.add_adapter, []

    async def note(adapter):
        held.append(sorted(served.version for served in registry.held()))
        return await add_adapter(adapter)

    first, second = setup.publish(1), setup.publish(2)
    await use(registry, first)
    await use(registry, second)
    monkeypatch.setattr(setup.engine, "add_adapter", note)
    await use(registry, first)
    assert held == [[1, 2]]
    assert sorted(served.version for served in registry.held()) == [1, 2]


@pytest.mark.parametrize("end", ["forgotten", "displaced", "unloaded", "kept"])
async def test_a_version_that_is_on_its_way_to_disk_ends_with_its_run_and_for_other_content(setup, end):
    registry = setup.registry(max_loaded=1, on_disk=1)
    released = []
    registry.listeners.released.append(released.append)
    first, other = setup.publish(1), setup.publish(1, new_run_id())
    await use(registry, first)
    setup.engine.gate.clear()
    using = asyncio.create_task(use(registry, other))
    await until(lambda: not len(registry))
    assert [served.run_id for served in registry.held()] == [RUN]
    match end:
        case "forgotten":
            registry.forget_run(RUN)
        case "displaced":
            registry.displace(VersionKey(RUN, 1), "0" * 64)
        case "unloaded":
            registry.unload(first, TENANT)
    setup.engine.gate.set()
    await using
    is_kept = end == "kept"
    assert {served.run_id for served in registry.held()} == {other.run_id} | ({RUN} if is_kept else set())
    assert [served.run_id for served in released] == ([] if is_kept else [RUN])


async def test_the_newest_version_is_unknown_without_a_trainer(setup):
    registry = setup.registry()
    setup.publish(1)
    with pytest.raises(errors.TrainerUnavailable):
        await use(registry, ModelRef(run_id=RUN))
    setup.resolver.announced(RUN, 1, 1)
    assert (await use(registry, ModelRef(run_id=RUN))).served.version == 1


async def test_a_checkpoint_overwritten_after_it_was_verified_is_served_by_its_new_name_alone(setup):
    registry, path = setup.registry(), f"paceline://{RUN}/sampler/best"
    old = make_checkpoint(setup.volume, setup.model, path, seed=1)
    directory = setup.volume.checkpoint(CheckpointPath.parse(path))

    def overwrite():
        setup.bridge.before_load = int
        shutil.copytree(directory, directory.with_name("old"))
        shutil.rmtree(directory)
        make_checkpoint(setup.volume, setup.model, path, seed=2)

    setup.bridge.before_load = overwrite
    lease = await use(registry, ModelRef(checkpoint=path))
    new = read_manifest(directory)
    assert old.model.blake3 != new.model.blake3 == lease.served.blake3
    assert (setup.bridge.fetches, len(registry)) == (2, 1)
    scored = await setup.engine.compute_logprobs(PROMPT, lease.adapter, TENANT)
    again = await setup.engine.add_adapter(fresh := Adapter(991, "new", directory))
    assert again
    np.testing.assert_array_equal(scored, await setup.engine.compute_logprobs(PROMPT, fresh, TENANT))


@pytest.mark.parametrize("how", ["replaced", "written over", "removed"])
async def test_a_file_that_changed_after_it_was_verified_is_not_served(setup, how):
    registry, ref = setup.registry(), setup.publish(1)
    weights = setup.volume.version(RUN, 1) / WEIGHTS_FILE
    other = bytearray(weights.read_bytes())
    other[-1] ^= 1

    def change():
        setup.bridge.before_load = int
        if how == "replaced":
            weights.with_name("other").write_bytes(other)
            weights.with_name("other").replace(weights)
        elif how == "written over":
            weights.write_bytes(other)
        else:
            shutil.rmtree(weights.parent)

    setup.bridge.before_load = change
    # Only the trainer knows whether a missing version is still to come.
    with pytest.raises(errors.TrainerUnavailable if how == "removed" else errors.ChecksumMismatch):
        await use(registry, ref)
    assert not len(registry)
    assert not setup.engine.adapters


async def test_a_version_whose_staged_files_are_removed_under_its_load_is_fetched_again(
    setup, tmp_path, caplog, capsys
):
    registry, ref = setup.registry(), setup.publish(1)
    setup.bridge.staging = tmp_path

    def remove():
        setup.bridge.before_load = int
        shutil.rmtree(tmp_path / "1")

    setup.bridge.before_load = remove
    assert (await use(registry, ref)).served.version == 1
    assert setup.bridge.fetches == 2
    await registry.close()
    gc.collect()  # until then asyncio logs no failure of a task that nobody asked for
    assert "Traceback" not in caplog.text + capsys.readouterr().out


async def test_a_push_whose_files_are_removed_under_its_load_is_to_be_sent_again(setup, tmp_path):
    registry, ref = setup.registry(), setup.publish(1)
    setup.bridge.staging = tmp_path
    for number, removed in ((1, True), (2, False)):
        staged = await setup.bridge.fetch(ref, TENANT)
        if removed:
            shutil.rmtree(tmp_path / str(number))
            with pytest.raises(errors.EngineUnavailable):
                await registry.install(staged, registry.arrivals.expect(RUN))
            assert not len(registry)
        else:
            await registry.install(staged, registry.arrivals.expect(RUN))
    assert (await use(registry, ref)).served.version == 1


async def test_unloading_a_version_whose_files_were_removed_succeeds(setup, tmp_path, caplog, capsys):
    registry, ref = setup.registry(), setup.publish(1)
    setup.bridge.staging = tmp_path
    await use(registry, ref)
    shutil.rmtree(tmp_path / "1")
    released: list[ServedModel] = []
    registry.listeners.released.append(released.append)
    registry.unload(ref, TENANT)
    await until(lambda: released)
    assert not len(registry)
    await registry.close()
    assert "Traceback" not in caplog.text + capsys.readouterr().out


async def test_a_pushed_version_is_the_newest_only_while_it_is_held(setup, tmp_path):
    registry, newest = setup.registry(keep=4), ModelRef(run_id=RUN)
    for version in (1, 5, 2**31 - 1):
        setup.publish(version)
    setup.resolver.announced(RUN, 1, 1)
    await use(registry, newest)
    for version in (5, 2**31 - 1):
        staged = copied(
            await VolumeBridge.fetch(setup.bridge, ModelRef(run_id=RUN, version=version), TENANT),
            tmp_path / str(version),
        )
        await registry.install(staged, registry.arrivals.expect(RUN))
    async with registry.lease(newest, TENANT) as lease:
        assert lease.served.version == 2**31 - 1
        registry.unload(ModelRef(run_id=RUN, version=2**31 - 1), TENANT)
        assert (await use(registry, newest)).served.version == 5, "from now on, although the other is still in use"
    registry.unload(ModelRef(run_id=RUN, version=5), TENANT)
    assert (await use(registry, newest)).served.version == 1
    registry.unload(ModelRef(run_id=RUN, version=1), TENANT)
    assert (await use(registry, newest)).served.version == 1, "one that was announced is fetched again"


async def test_a_pushed_version_that_is_evicted_and_kept_nowhere_is_not_the_newest(setup, tmp_path):
    registry, newest = setup.registry(max_loaded=1), ModelRef(run_id=RUN)
    setup.resolver.announced(RUN, 1, 1)
    one, high = setup.publish(1), setup.publish(9)
    staged = copied(await VolumeBridge.fetch(setup.bridge, high, TENANT), tmp_path / "9")
    await registry.install(staged, registry.arrivals.expect(RUN))
    assert setup.resolver.newest(RUN) == 9
    await use(registry, one)
    assert (await use(registry, newest)).served.version == 1


async def test_files_that_belong_there_stay_on_the_volume(setup):
    registry = setup.registry()
    ref = setup.publish(1)
    await use(registry, ref)
    registry.unload(ref, TENANT)
    await until(lambda: not len(registry))
    assert setup.volume.version(RUN, 1).is_dir()
    shutil.rmtree(setup.volume.version(RUN, 1))
    with pytest.raises(errors.TrainerUnavailable):  # only it could say whether the version is still to come
        await use(registry, ref)


def verified_later(staged: StagedAdapter, directory: Path) -> tuple[StagedAdapter, asyncio.Future]:
    """Return a copy of a version whose bytes are verified when the future has the manifest, or its failure."""
    outcome = asyncio.get_running_loop().create_future()

    async def verify():
        return await outcome

    copy = shutil.copytree(staged.directory, directory)
    return StagedAdapter(staged.manifest, copy, True, asyncio.create_task(verify()), on_disk=True), outcome


async def test_a_version_that_proves_damaged_keeps_its_place_until_the_engine_has_dropped_it(setup, tmp_path):
    registry, ref = setup.registry(max_loaded=1), setup.publish(2)
    staged = await setup.bridge.fetch(setup.publish(1), TENANT)
    damaged, outcome = verified_later(staged, tmp_path / "damaged")
    installing = asyncio.create_task(registry.install(damaged, registry.arrivals.expect(RUN)))
    await until(lambda: setup.engine.adapters)
    setup.engine.gate.clear()
    outcome.set_exception(errors.ChecksumMismatch("damaged"))
    using = asyncio.create_task(use(registry, ref))
    await until(lambda: setup.bridge.fetches == 2)
    await asyncio.wait({using}, timeout=0.3)
    assert len(setup.engine.adapters) == 1
    setup.engine.gate.set()
    with pytest.raises(errors.ChecksumMismatch):
        await installing
    assert (await using).served.version == 2


async def test_a_version_that_is_loaded_anew_while_it_is_evicted_is_held_once_and_leaves_no_files(setup, tmp_path):
    registry = setup.registry(max_loaded=2, keep=8, on_disk=8)
    released = []
    registry.listeners.released.append(released.append)
    staged = await setup.bridge.fetch(setup.publish(1), TENANT)
    (slow, slow_outcome), (fast, fast_outcome) = (verified_later(staged, tmp_path / name) for name in ("slow", "fast"))
    first = asyncio.create_task(registry.install(slow, registry.arrivals.expect(RUN)))
    await until(lambda: setup.engine.adapters)
    fast_outcome.set_result(staged.manifest)
    await registry.install(fast, registry.arrivals.expect(RUN))
    setup.engine.gate.clear()
    using = asyncio.create_task(use(registry, setup.publish(2)))
    await until(lambda: not len(registry))
    slow_outcome.set_result(staged.manifest)
    await first
    setup.engine.gate.set()
    await using
    assert sorted(served.version for served in registry.held()) == [1, 2]
    await until(lambda: not fast.directory.exists())
    assert slow.directory.exists()
    assert not released


async def test_a_version_that_finds_no_place_waits_on_only_if_it_was_not_loaded_anew_meanwhile(setup, tmp_path):
    registry = setup.registry(max_loaded=2, keep=8, on_disk=8, per_tenant=1)
    one, two = setup.publish(1), setup.publish(2)
    await use(registry, one)
    await use(registry, two)
    again, outcome = verified_later(await setup.bridge.fetch(one, TENANT), tmp_path / "again")
    setup.engine.gate.clear()
    registry.unload(two, TENANT)
    installing = asyncio.create_task(registry.install(again, registry.arrivals.expect(RUN)))
    await until(lambda: len(setup.engine.adapters) == 2)
    assert len(setup.disk) == 1
    returning = asyncio.create_task(use(registry, one))
    await until(lambda: not len(setup.disk))
    outcome.set_result(again.manifest)
    await installing
    async with registry.lease(one, TENANT):
        setup.engine.gate.set()
        with pytest.raises(errors.QuotaExceeded):
            await returning
        assert [served.version for served in registry.held()] == [1]
