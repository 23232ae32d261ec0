"""The trainer's metrics of its runs' commands and of the samplers that watch."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from paceline import layout
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.publish.watch_hub import Watcher, WatchHub
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.storage import RunStorage
from trainer_service.service_metrics import TrainerMetrics, add_disk_metrics, add_run_metrics, add_watch_metrics
from trainer_service.settings import TrainerSettings

RUN, OTHER = (layout.new_run_id() for _ in range(2))


def announcement(version, run_id=RUN):
    manifest = pb.Manifest()
    manifest.model.run_id, manifest.model.version, manifest.model.blake3 = run_id, version, f"{version:064}"
    return pb.Announcement(manifest=manifest)


def ack(version, run_id=RUN):
    return pb.Acknowledgement(run_id=run_id, version=version, blake3=f"{version:064}")


class Watched:
    """A hub with one sampler, and its metrics."""

    def __init__(self):
        self.hub, self.registry = WatchHub(), CollectorRegistry()
        self.watcher = Watcher("one", {})
        add_watch_metrics(self.hub, self.registry)

    def behind(self):
        return self.registry.get_sample_value("paceline_trainer_sampler_behind_seconds", {"sampler": "one"})


@pytest.fixture
async def watched():
    made = Watched()
    await made.hub.join(made.watcher)
    return made


async def test_a_sampler_is_behind_from_an_announcement_until_it_has_acknowledged_the_newest(watched):
    assert watched.behind() == 0
    watched.hub.announce(announcement(1))
    first = watched.behind()
    assert watched.behind() > first > 0
    watched.hub.announce(announcement(2))
    assert watched.behind() > first  # it has stood still since the first one
    await watched.hub.acknowledge(watched.watcher, ack(1))
    assert watched.behind() > 0  # the second
    await watched.hub.acknowledge(watched.watcher, ack(2))
    assert watched.behind() == 0


async def test_a_sampler_that_lacks_one_of_two_runs_is_behind_until_that_run_is_deleted(watched):
    for run_id in (RUN, OTHER):
        watched.hub.announce(announcement(1, run_id))
    await watched.hub.acknowledge(watched.watcher, ack(1))
    assert watched.behind() > 0
    watched.hub.forget_run(OTHER)
    assert watched.behind() == 0


async def test_a_sampler_that_left_has_no_value(watched):
    assert watched.registry.get_sample_value("paceline_trainer_watchers") == 1
    await watched.hub.leave(watched.watcher)
    assert watched.behind() is None
    assert watched.registry.get_sample_value("paceline_trainer_watchers") == 0


async def test_a_trainer_without_runs_replays_nothing_and_has_the_room_of_its_disk(tmp_path):
    settings = TrainerSettings(model="tiny", checkpoint_dir=tmp_path, min_free_bytes=7, insecure=True)
    volume, registry = layout.Volume(tmp_path), CollectorRegistry()
    storage = RunStorage(volume, settings, NO_FAILPOINTS, WaitingBytes(), NO_GUARD)
    add_run_metrics(RunRegistry(volume, storage, DiskGuard(volume=volume)), settings.snapshot_seconds, registry)
    add_disk_metrics(settings, registry)
    shown = {
        name: registry.get_sample_value(f"paceline_trainer_{name}")
        for name in ("runs", "replay_seconds", "snapshot_seconds", "volume_min_free_bytes")
    }
    assert shown == {
        "runs": 0,
        "replay_seconds": 0,
        "snapshot_seconds": settings.snapshot_seconds,
        "volume_min_free_bytes": 7,
    }
    assert registry.get_sample_value("paceline_trainer_volume_free_bytes") > 0


def test_what_commands_waited_and_took_is_observed_by_tenant_and_by_method():
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    metrics.waited("team", 3)
    metrics.executed("OptimStep", 0.5)
    assert registry.get_sample_value("paceline_trainer_command_wait_seconds_sum", {"tenant": "team"}) == 3
    assert registry.get_sample_value("paceline_trainer_command_seconds_sum", {"method": "OptimStep"}) == 0.5
