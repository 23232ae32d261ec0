"""A sampler takes part in every broadcast, also in one whose version it cannot keep."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from support.models.tiny_models import make_tiny_llama
from support.stacks.weight_stack import BASE, make_version

from paceline import errors
from paceline.layout import Volume, new_run_id
from paceline.types import ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.metrics import SamplerMetrics
from sampler_service.transports.base import ManifestRules, VersionKey
from sampler_service.transports.collective import GroupReceiver
from sampler_service.transports.staging import StagingArea

RUN = new_run_id()


class Member:
    """A member of a process group that records what it receives, and where."""

    generation = 1

    def __init__(self):
        self.transfers = []

    async def transfer(self, file, size):
        self.transfers.append((file, size))


async def test_a_sampler_without_room_for_a_version_takes_part_in_its_broadcast(tmp_path, monkeypatch):
    def allocate(manifest):
        raise errors.DiskFull("the disk is full")

    manifest = make_version(Volume(tmp_path / "volume"), make_tiny_llama(tmp_path / BASE), RUN, 1)
    staging = StagingArea(tmp_path)
    monkeypatch.setattr(staging, "allocate", allocate)
    receiver = GroupReceiver(staging, ManifestRules(BASE, 8, 1 << 30), SamplerMetrics(CollectorRegistry()))
    receiver._member = member = Member()
    receiver.expect(VersionKey(RUN, 1), pb.Announcement(manifest=manifest, broadcast_generation=1))
    with pytest.raises(errors.DiskFull):
        await receiver.receive(ModelRef(run_id=RUN, version=1), "")
    assert member.transfers == [(None, manifest.total_size)]
    staging.close()
