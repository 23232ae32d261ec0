"""The states of versions, and the moves between them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.layout import new_run_id
from paceline.weights.v1 import weight_service_pb2 as pb
from sampler_service.stores.version import MOVES, VersionState, VersionTable
from sampler_service.transports.base import StagedAdapter

RUN = new_run_id()
LOADED = (VersionState.VERIFYING, VersionState.ACTIVE)


def staged(version: int = 1) -> StagedAdapter:
    manifest = pb.Manifest(tenant="team")
    manifest.model.run_id, manifest.model.version = RUN, version
    return StagedAdapter(manifest, Path(), temporary=False)


def moved(table, *states, version=1):
    added = table.add(staged(version))
    for state in states:
        table.move(added, state)
    return added


def _ways(state: VersionState) -> list[VersionState]:
    """Return the shortest way from arrival to a state."""
    ways: dict[VersionState, list[VersionState]] = {VersionState.ARRIVING: []}
    while state not in ways:
        for here, way in list(ways.items()):
            for there in MOVES[here]:
                ways.setdefault(there, [*way, there])
    return ways[state]


@pytest.mark.parametrize("state", VersionState)
def test_each_state_is_reached_and_only_permitted_moves_lead_from_it(state):
    for other in VersionState:
        table = VersionTable()
        version = moved(table, *_ways(state))
        if other in MOVES[state]:
            table.move(version, other)
            assert version.state is other
        else:
            with pytest.raises(RuntimeError, match=f"from {state.name} to {other.name}"):
                table.move(version, other)
            assert version.state is state


@pytest.mark.parametrize("state", VersionState)
def test_every_version_can_be_released(state):
    table = VersionTable()
    version = moved(table, *_ways(state))
    seen = {state}
    while version.state is not VersionState.RELEASED:
        states = MOVES[version.state]
        ends = VersionState.RELEASED in states
        table.move(version, VersionState.RELEASED if ends else next(iter(states - seen)))
        seen.add(version.state)
    assert not list(table)


@pytest.mark.parametrize("state", VersionState)
def test_requests_find_it_while_it_is_active_or_retired_and_then_not(state):
    table = VersionTable()
    version = moved(table, *_ways(state))
    is_findable = state in {VersionState.ACTIVE, VersionState.RETIRED}
    assert table.find(version.key) is (version if is_findable else None)
    assert table.findable() == [version] * is_findable
    assert table.num_findable() == is_findable


def test_of_a_key_one_version_at_most_is_active():
    table = VersionTable()
    moved(table, *LOADED)
    other = moved(table, VersionState.VERIFYING)
    with pytest.raises(RuntimeError, match="active already"):
        table.move(other, VersionState.ACTIVE)
    assert other.state is VersionState.VERIFYING


def test_one_that_returns_from_disk_is_held_all_the_way_and_one_that_comes_from_the_trainer_once_it_is_active():
    table = VersionTable()
    version = table.add(staged())
    held = []
    way = (*LOADED, VersionState.EVICTING, VersionState.ON_DISK, VersionState.ARRIVING, *LOADED, VersionState.DISPLACED)
    for state in way:
        table.move(version, state)
        held.append(table.held() == [version])
    assert held == [False, True, True, True, True, True, True, False]


def test_the_one_used_last_is_the_last_and_retiring_is_no_use():
    table = VersionTable()
    one, two, three = (moved(table, *LOADED, version=number) for number in (1, 2, 3))
    table.use(one)
    table.move(two, VersionState.RETIRED)
    assert table.findable() == [two, three, one]
    assert [version.requests_in_flight for version in table] == [0, 0, 1]


async def test_who_waits_is_woken_by_the_next_move_of_any_version():
    table = VersionTable()
    waiting = [asyncio.create_task(table.moved()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    moved(table, VersionState.VERIFYING)
    await asyncio.gather(*waiting)
    late = asyncio.create_task(table.moved())
    await asyncio.sleep(0)
    assert not late.done(), "it waits for a move after its last look"
    late.cancel()
