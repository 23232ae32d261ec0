"""Which samplers are invited to the process group."""

from __future__ import annotations

from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.publish.process_group import BroadcastGroup, GroupOptions
from trainer_service.publish.watch_hub import Watcher, WatchHub


def test_the_first_sampler_that_cannot_join_is_left_out_and_those_that_wait_for_it_are_not():
    group = BroadcastGroup(GroupOptions("127.0.0.1:0", "gloo", 10), WatchHub())
    group._generation = 2
    watchers = [Watcher(name, {}, joins_group=True) for name in ("earlier", "first", "second")]
    for watcher, generation in zip(watchers, (1, 2, 2), strict=True):
        group.left(watcher, pb.LeftGroup(generation=generation, reason="PEER_LOST"))
    assert [watcher.sampler_id for watcher in group._absent] == ["first"]
