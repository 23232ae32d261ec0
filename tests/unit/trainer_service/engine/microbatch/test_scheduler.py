"""Passes are filled fairly by tokens, and their content depends only on the demands and their order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from trainer_service.engine.microbatch.job import PackedSegment
from trainer_service.engine.microbatch.scheduler import Scheduler

PACK = 4096


@dataclass
class Demand:
    run_id: str
    waiting: list[list[PackedSegment]] = field(default_factory=list)
    forward_only: bool = False
    alone: bool = False


def demand(run_id, *lengths, **kind):
    segments = [PackedSegment(index, length, np.arange(length)) for index, length in enumerate(lengths)]
    groups = [sorted(segments, key=lambda segment: -segment.length)] if segments else []
    return Demand(run_id, groups, **kind)


def tokens(share):
    return sum(segment.length for segment in share[1])


def drain(scheduler, demands):
    """Fill passes until nothing waits; return each as {run: tokens}."""
    passes = []
    while share := scheduler.next_passes(demands)[0]:
        passes.append({each.run_id: tokens((each, segments)) for each, segments in share})
    return passes


def jain(served):
    """Return Jain's index of fairness: 1 if all are served equally (Jain et al., DEC-TR-301, 1984)."""
    values = np.asarray(list(served), float)
    return values.sum() ** 2 / (len(values) * (values**2).sum())


@pytest.mark.parametrize("longest", [64, 1024, 4000])
def test_runs_that_keep_waiting_are_served_alike(longest):
    random, scheduler, served = Random(longest), Scheduler(PACK), Counter()
    # Each run sends commands of its own size, one after the other, with sequences of its own length.
    sizes = {f"run{i}": (random.randint(1000, 100_000), random.randint(longest // 4, longest)) for i in range(8)}
    demands = {run_id: demand(run_id) for run_id in sizes}
    for _ in range(100):
        for run_id, (size, length) in sizes.items():
            if not demands[run_id].waiting:
                lengths = (random.randint(length // 2, length) for _ in range(1 + size // length))
                demands[run_id] = demand(run_id, *lengths)
        for each, segments in scheduler.next_passes(list(demands.values()))[0]:
            served[each.run_id] += tokens((each, segments))
    assert jain(served.values()) >= 0.95


def test_small_commands_join_the_next_pass_beside_a_long_one():
    scheduler, long = Scheduler(PACK), demand("long", *[500] * 200)
    for _ in range(5):
        scheduler.next_passes([long])[0]
    small = [demand(f"small{i}", 100, 60) for i in range(4)]
    shares = scheduler.next_passes([long, *small])[0]
    assert {each.run_id: tokens((each, segments)) for each, segments in shares} == {
        "long": 3000,
        **{f"small{i}": 160 for i in range(4)},
    }
    assert not any(each.waiting for each in small)


def test_waiting_earns_nothing():
    """A run that returns after a long time gets its share from then on, but nothing for the time before."""
    scheduler = Scheduler(1000)
    drain(scheduler, [demand("late", 100)])
    drain(scheduler, [demand("busy", *[100] * 500)])
    late, busy = demand("late", *[100] * 20), demand("busy", *[100] * 20)
    first = drain(scheduler, [busy, late])[0]
    assert first == {"late": 500, "busy": 500}


def test_who_was_served_alone_for_long_owes_nothing():
    scheduler = Scheduler(1000)
    drain(scheduler, [demand("busy", *[100] * 500)])
    assert drain(scheduler, [demand("fresh", *[100] * 10), demand("busy", *[100] * 10)])[0]["busy"] >= 400


def test_a_sequence_longer_than_a_pass_is_one_by_itself_and_others_go_on():
    scheduler = Scheduler(1000)
    passes = drain(scheduler, [demand("huge", 5000, 4000), demand("small", *[100] * 30)])
    assert {"huge": 5000} in passes
    assert {"huge": 4000} in passes
    assert sum(each.get("small", 0) for each in passes) == 3000


def test_kinds_do_not_mix_and_none_starves():
    demands = [
        demand("train", *[100] * 50),
        demand("score", *[100] * 50, forward_only=True),
        demand("alone", *[100] * 50, alone=True),
    ]
    passes = drain(Scheduler(1000), demands)
    assert all(len(each) == 1 for each in passes)
    assert [len([each for each in passes if run in each]) for run in ("train", "score", "alone")] == [5, 5, 5]
    assert {next(iter(each)) for each in passes[:3]} == {"train", "score", "alone"}


def test_without_joint_passes_runs_take_turns_with_the_packs_that_they_have_alone():
    lengths = {"a": [300, 500, 700, 100, 900], "b": [400] * 6}
    turns = drain(Scheduler(1000, joint=False), [demand(run_id, *own) for run_id, own in lengths.items()])
    assert all(len(each) == 1 for each in turns)
    for run_id, own in lengths.items():
        alone = drain(Scheduler(1000), [demand(run_id, *own)])
        assert [each for each in turns if run_id in each] == alone
    assert turns[0].keys() != turns[1].keys()


def test_the_same_demands_in_the_same_order_give_the_same_passes():
    def once():
        random = Random(3)
        return drain(Scheduler(PACK), [demand(f"run{i}", *random.choices(range(1, 2000), k=30)) for i in range(6)])

    assert once() == once()


def test_ranks_get_passes_alike_in_size_and_no_pass_is_too_long():
    random, scheduler, served = Random(0), Scheduler(PACK, ranks=4), []
    demands = [demand("one", *(random.randint(1, PACK // 4) for _ in range(200))), demand("other", *[2 * PACK] * 3)]
    expected = sum(segment.length for each in demands for group in each.waiting for segment in group)
    while any(passes := scheduler.next_passes(demands)):
        loads = [sum(map(tokens, shares)) for shares in passes]
        assert all(
            load <= PACK or [len(segments) for _, segments in shares] == [1]
            for load, shares in zip(loads, passes, strict=True)
        )
        served += loads
        if demands[0].waiting and not demands[1].waiting:
            assert min(loads) >= 0.75 * PACK  # Otherwise a segment, at most a quarter of a pack, would have fitted.
    assert sum(served) == expected


def test_what_is_too_little_for_one_pass_is_spread_over_the_ranks():
    passes = Scheduler(PACK, ranks=2).next_passes([demand("run", 30, 20, 10)])
    assert [sum(map(tokens, shares)) for shares in passes] == [30, 30]
    assert Scheduler(PACK, ranks=2).next_passes([]) == [[], []]
