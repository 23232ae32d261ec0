"""What samplers report about versions, and how a publish uses it."""

from __future__ import annotations

import asyncio

import pytest

from paceline import errors
from paceline.layout import new_run_id
from paceline.types import AdapterGroup, FullParameters, LoraConfig
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.publish.servable import ServingLimits
from trainer_service.publish.watch_hub import AckPolicy, Watcher, WatchHub

RUN = new_run_id()
KEY = (RUN, 1)
OURS, THEIRS = "a" * 64, "b" * 64


def announcement(version=1, blake3=OURS):
    manifest = pb.Manifest()
    manifest.model.run_id, manifest.model.version, manifest.model.blake3 = RUN, version, blake3
    return pb.Announcement(manifest=manifest)


def ack(blake3=OURS, version=1):
    return pb.Acknowledgement(run_id=RUN, version=version, blake3=blake3)


def refusal(reason, *, pending=False, message=""):
    return pb.Refusal(run_id=RUN, version=1, reason=reason, pending=pending, message=message)


async def joined(hub, name="one", held=None, instance="i"):
    """Add a sampler that takes version 1 for the newest if it holds any."""
    watcher = Watcher(name, dict(held or {}), {RUN: 1} if held else {}, instance=instance)
    await hub.join(watcher)
    return watcher


async def settled(hub, policy=AckPolicy.ALL, seconds=0.05):
    return await hub.wait(KEY, policy, frozenset(watcher.sampler_id for watcher in hub.watchers()), seconds)


def told(watcher):
    """Drain and return the messages for a watcher."""
    said = []
    while not watcher.outbox.empty():
        said.append(watcher.outbox.get_nowait())
    return said


async def test_an_acknowledgement_of_other_bytes_is_a_refusal_and_no_lease():
    hub = WatchHub()
    watcher = await joined(hub)
    hub.announce(announcement())
    await hub.acknowledge(watcher, ack(THEIRS))
    with pytest.raises(errors.ChecksumMismatch, match=THEIRS) as failure:
        await settled(hub)
    assert failure.value.metadata == {"version": "1", "acknowledged": "0", "missing": "one"}
    assert KEY not in hub.leased()
    await hub.acknowledge(watcher, ack())
    assert [one.blake3 for one in await settled(hub)] == [OURS]
    assert KEY in hub.leased()


async def test_other_bytes_that_were_acknowledged_before_a_version_was_announced_do_not_end_its_publish():
    hub = WatchHub()
    watcher = await joined(hub)
    await hub.acknowledge(watcher, ack(THEIRS))
    assert KEY in hub.leased()
    hub.announce(announcement())
    with pytest.raises(errors.AckTimeout):
        await settled(hub)


@pytest.mark.parametrize("policy", [AckPolicy.ANY, AckPolicy.ALL])
@pytest.mark.parametrize("is_announced_first", [True, False])
async def test_a_sampler_that_holds_a_version_when_it_watches_again_has_acknowledged_it(policy, is_announced_first):
    hub = WatchHub()
    await hub.leave(await joined(hub))  # the acknowledgement was lost with this watch
    if is_announced_first:
        hub.announce(announcement())
    waiting = asyncio.create_task(hub.wait(KEY, policy, frozenset({"one"}), 30))
    await asyncio.sleep(0)
    await joined(hub, held={KEY: OURS})
    if not is_announced_first:  # the trainer was started again, and the publish executes again
        assert not waiting.done()
        waiting.cancel()
        waiting = asyncio.create_task(hub.wait(KEY, policy, hub.announce(announcement()), 30))
    assert [(one.sampler_id, one.run_id, one.version, one.blake3) for one in await waiting] == [("one", *KEY, OURS)]


@pytest.mark.parametrize("blake3", ["", THEIRS])
async def test_a_sampler_that_holds_other_bytes_when_it_watches_again_has_acknowledged_nothing(blake3):
    hub = WatchHub()
    hub.announce(announcement())
    await joined(hub, held={KEY: blake3})
    with pytest.raises(errors.AckTimeout):
        await settled(hub)


@pytest.mark.parametrize("policy", [AckPolicy.ANY, AckPolicy.ALL])
async def test_a_sampler_that_is_full_for_now_is_waited_for(policy):
    hub = WatchHub()
    watcher = await joined(hub)
    hub.announce(announcement())
    await hub.refuse(watcher, refusal("OVERLOADED", pending=True))
    waiting = asyncio.create_task(settled(hub, policy, 30))
    await asyncio.sleep(0)
    assert not waiting.done()
    await hub.acknowledge(watcher, ack())
    assert len(await waiting) == 1


@pytest.mark.parametrize("reason", ["OVERLOADED", "DISK_FULL", "ENGINE_UNAVAILABLE"])
async def test_a_version_that_a_sampler_has_no_room_for_is_told_to_exist_and_who_lacks_it(reason):
    hub = WatchHub()
    watcher = await joined(hub)
    await hub.acknowledge(await joined(hub, "two"), ack())
    hub.announce(announcement())
    await hub.refuse(watcher, refusal(reason))
    with pytest.raises(errors.AckTimeout, match=rf"version 1 exists.*one \({reason}\)") as failure:
        await settled(hub)
    assert failure.value.metadata["version"] == "1"
    assert "one" in failure.value.metadata["missing"]
    await hub.acknowledge(watcher, ack())
    assert len(await settled(hub)) == 2


async def test_a_refusal_for_good_is_told_in_the_samplers_words():
    hub = WatchHub()
    watcher = await joined(hub)
    hub.announce(announcement())
    await hub.refuse(watcher, refusal("RANK_TOO_LARGE", message="has rank 16; this sampler takes at most 8"))
    with pytest.raises(errors.RankTooLarge, match=r"version 1 exists, and sampler one refused it.*at most 8"):
        await settled(hub, seconds=30)


async def test_the_newest_version_is_announced_to_who_holds_it_and_takes_another_for_the_newest():
    hub = WatchHub()
    hub.announce(announcement(2))
    asked_for = await joined(hub, held={(RUN, 1): THEIRS, (RUN, 2): OURS})
    assert [said.announcement.manifest.model.version for said in told(asked_for)] == [2]


async def test_the_newest_version_is_announced_to_who_holds_other_bytes_or_a_later_number():
    hub = WatchHub()
    hub.announce(announcement())
    lacking = await joined(hub, "lacks it")
    holding = await joined(hub, "holds it", {KEY: OURS})
    silent = await joined(hub, "does not say", {KEY: ""})
    other = await joined(hub, "holds others", {KEY: THEIRS})
    ahead = await joined(hub, "is ahead", {KEY: OURS, (RUN, 7): THEIRS})
    assert [len(told(watcher)) for watcher in (lacking, holding, silent, other, ahead)] == [1, 0, 0, 1, 1]


async def test_a_second_sampler_of_one_name_is_refused_and_the_first_goes_on():
    hub = WatchHub()
    first = await joined(hub, instance="first")
    with pytest.raises(errors.SamplerExists):
        await joined(hub, instance="second")
    hub.announce(announcement())
    assert len(told(first)) == 1
    await hub.leave(first)
    await joined(hub, instance="second")


async def test_a_sampler_that_watches_again_ends_its_older_watch():
    hub = WatchHub()
    older = await joined(hub)
    newer = await joined(hub)
    assert isinstance(told(older)[0], errors.SamplerExists)
    await hub.leave(older)
    hub.announce(announcement())
    assert len(told(newer)) == 1


async def test_a_sampler_that_did_not_watch_at_a_runs_deletion_is_told_when_it_joins():
    hub, other = WatchHub(), new_run_id()
    hub.announce(announcement())
    hub.forget_run(RUN)
    watcher = await joined(hub, held={(RUN, 1): OURS, (RUN, 2): OURS, (other, 1): OURS})
    assert [message.run_deleted.run_id for message in told(watcher)] == [RUN]
    assert told(await joined(hub, "two", held={(other, 1): OURS})) == []


GROUPS = (AdapterGroup("train_attn", ("q_proj",)), AdapterGroup("train_unembed", ("lm_head",)))
MODULES = ("model.layers.0.q_proj", "lm_head")
HEADLESS = ServingLimits("adapters", 16, frozenset({"lm_head"}))
UNSERVABLE = {
    "head": (HEADLESS, LoraConfig(train_unembed=True, rank=8), "lora.train_unembed", "lm_head: set train_unembed=Fa"),
    "named": (HEADLESS, LoraConfig(8, target_modules=("lm_head",)), "lora.target_modules", "out of target_modules"),
    "group": (
        ServingLimits("adapters", 16, frozenset(MODULES)),
        LoraConfig(rank=8),
        "lora.train_attn",
        "0.q_proj and 1 other modules: train an adapter without these modules: set train_attn=False",
    ),
    "rank": (ServingLimits("adapters", 4), LoraConfig(rank=8), "lora.rank", "set rank to at most 4"),
    "adapter": (ServingLimits("models", 16), LoraConfig(rank=8), "lora", "no adapters: train all parameters"),
    "whole": (ServingLimits("adapters", 16), FullParameters(), "full", "no whole models: train an adapter"),
}


@pytest.mark.parametrize(("limits", "parameters", "field", "message"), UNSERVABLE.values(), ids=UNSERVABLE)
async def test_a_run_is_unservable_while_samplers_watch_of_which_none_can_serve_it(limits, parameters, field, message):
    hub, modules = WatchHub(), () if isinstance(parameters, FullParameters) else MODULES
    assert hub.obstacle(parameters, modules, GROUPS) is None
    await hub.join(Watcher("one", {}, limits=limits))
    found = hub.obstacle(parameters, modules, GROUPS)
    assert (found.field, message in found.message) == (field, True)
    await hub.join(able := Watcher("other", {}))
    assert hub.obstacle(parameters, modules, GROUPS) is None
    await hub.leave(able)
    assert hub.obstacle(parameters, modules, GROUPS) == found


async def test_modules_count_as_unserved_if_no_sampler_that_watches_serves_them():
    hub = WatchHub()
    assert not hub.unserved_modules()
    await hub.join(Watcher("one", {}, limits=ServingLimits("adapters", 16, frozenset(MODULES))))
    await hub.join(Watcher("other", {}, limits=HEADLESS))
    assert hub.unserved_modules() == {"lm_head"}
