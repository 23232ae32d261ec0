"""Whom the sampler admits, and when it tells the others to come again."""

from __future__ import annotations

import heapq
from contextlib import ExitStack
from itertools import count

import pytest

from paceline.errors import Overloaded
from sampler_service.admission import Admission


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(admission: Admission, completions: int = 1, running: int = 0) -> float:
    with pytest.raises(Overloaded) as failure, admission.admit(completions, running):
        pass
    assert failure.value.retry_after is not None
    return failure.value.retry_after


def test_what_has_ended_makes_room_and_what_the_engine_still_runs_does_not(clock):
    admission = Admission(3, clock)
    with admission.admit(2, 0):
        refused(admission, 2)
        with admission.admit(1, 2):
            refused(admission)
        with admission.admit(1, 2):
            pass
    with admission.admit(3, 0):
        pass
    refused(admission, 1, running=3)


def test_one_that_fails_makes_room_too(clock):
    admission = Admission(1, clock)
    with pytest.raises(ValueError, match="torn"), admission.admit(1, 0):
        raise ValueError("torn")
    with admission.admit(1, 0):
        pass


def test_those_who_are_refused_are_told_different_times_no_later_than_half_a_minute(clock):
    admission = Admission(4, clock)
    with admission.admit(4, 0):
        told = [refused(admission) for _ in range(40)]
        assert told == sorted(told)
        assert told[0] >= 0.1
        assert len(set(told)) == 40
        many = [refused(admission) for _ in range(1000)]
        assert 15 <= min(many[500:]) < max(many) <= 30
        assert len(set(many[500:])) > 400
        clock.now += 60
        assert refused(admission) < 1


@pytest.mark.parametrize("seconds", [0.5, 10.0])
def test_the_times_follow_how_long_completions_take(clock, seconds):
    admission = Admission(4, clock)
    for _ in range(20):
        with admission.admit(1, 0):
            clock.now += seconds
        clock.now += 100  # Nobody comes for a while: that says nothing of how long completions take.
    with admission.admit(4, 0):
        told = [refused(admission) for _ in range(6)]
    assert told[-1] - told[0] == pytest.approx(5 * seconds / 4 / 1.5, rel=0.05)


@pytest.mark.parametrize("returns", [True, False], ids=["clients that go on", "clients that leave"])
@pytest.mark.parametrize("seconds", [0.3, 5.0])
def test_ten_times_as_many_clients_leave_no_gap_and_are_seldom_refused(clock, seconds, returns):
    """Clients that wait as they are told; completions take `seconds`, 32 of 64 at a time."""
    limit, running, order = 64, 32, count()
    admission = Admission(limit, clock)
    for _ in range(4 * limit):  # It has served before.
        with admission.admit(1, 0):
            clock.now += limit / running * seconds
    began, until = clock.now, clock.now + 100 * seconds
    events: list[tuple[float, int, str]] = [(clock.now, next(order), "asks") for _ in range(10 * limit)]
    admitted: list[ExitStack] = []
    busy = done = refusals = 0
    while events and events[0][0] < until and (returns or done < 6 * limit):
        clock.now, _, what = heapq.heappop(events)
        if what == "ends":
            busy, done = busy - 1, done + 1
            admitted.pop(0).close()
            if returns:
                heapq.heappush(events, (clock.now, next(order), "asks"))
        else:
            entered = ExitStack()
            try:
                entered.enter_context(admission.admit(1, 0))
                admitted.append(entered)
            except Overloaded as refusal:
                refusals += 1
                spread = 1 + (refusals % 10) / 20
                heapq.heappush(events, (clock.now + spread * (refusal.retry_after or 0), next(order), "asks"))
        while busy < min(running, len(admitted)):
            busy += 1
            heapq.heappush(events, (clock.now + seconds, next(order), "ends"))
    for entered in admitted:
        entered.close()
    possible = (clock.now - began) / seconds * running
    assert done > 0.95 * possible
    assert refusals < 4 * done
