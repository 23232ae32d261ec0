"""Which requests the sampler admits, and when it tells the others to retry."""

from __future__ import annotations

import heapq
from contextlib import ExitStack
from itertools import count

import pytest

from paceline.errors import Overloaded, QuotaExceeded
from sampler_service.scheduling.admission import Admission, ResourceLimits, Usage

A, B, C = "anquetil", "bartali", "coppi"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def admission_of(completions: int, clock: Clock, tokens: int = 0) -> Admission:
    return Admission(ResourceLimits(completions), ResourceLimits(tokens), clock)


def enter(admission: Admission, completions: int = 1, running: int = 0, tenant: str = A, tokens: int = 1):
    return admission.admit(tenant, Usage(completions, tokens), running)


def refused(admission: Admission, completions: int = 1, running: int = 0, tenant: str = A, tokens: int = 1) -> float:
    with pytest.raises(Overloaded) as failure, enter(admission, completions, running, tenant, tokens):
        pass
    assert failure.value.retry_after is not None
    return failure.value.retry_after


def in_flight(admission: Admission, tenant: str) -> tuple[int, int]:
    completions, tokens = admission.used(tenant)
    return completions.used, tokens.used


def test_what_has_ended_makes_room_and_what_the_engine_still_runs_does_not(clock):
    admission = admission_of(3, clock)
    with enter(admission, 2, 0):
        refused(admission, 2)
        with enter(admission, 1, 2):
            refused(admission)
        with enter(admission, 1, 2):
            pass
    with enter(admission, 3, 0):
        pass
    refused(admission, 1, running=3)


def test_one_that_fails_makes_room_too(clock):
    admission = admission_of(1, clock)
    with pytest.raises(ValueError, match="torn"), enter(admission, 1, 0):
        raise ValueError("torn")
    with enter(admission, 1, 0):
        pass


def test_those_who_are_refused_are_told_different_times_no_later_than_half_a_minute(clock):
    admission = admission_of(4, clock)
    with enter(admission, 4, 0):
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
    admission = admission_of(4, clock)
    for _ in range(20):
        with enter(admission, 1, 0):
            clock.now += seconds
        clock.now += 100  # An idle time, which says nothing about how long completions take.
    with enter(admission, 4, 0):
        told = [refused(admission) for _ in range(6)]
    assert told[-1] - told[0] == pytest.approx(5 * seconds / 4 / 1.5, rel=0.05)


@pytest.mark.parametrize("returns", [True, False], ids=["clients that go on", "clients that leave"])
@pytest.mark.parametrize("seconds", [0.3, 5.0])
def test_ten_times_as_many_clients_leave_no_gap_and_are_seldom_refused(clock, seconds, returns):
    """Clients retry when they are told to; completions take `seconds`, 32 of 64 at a time."""
    limit, running, order = 64, 32, count()
    admission = admission_of(limit, clock)
    for _ in range(4 * limit):  # It has served requests before.
        with enter(admission, 1, 0):
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
                entered.enter_context(enter(admission, 1, 0))
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


def test_what_one_tenant_holds_never_locks_another_out(clock):
    admission = admission_of(4096, clock)
    with ExitStack() as flood:
        for _ in range(16):
            flood.enter_context(enter(admission, 256))
        refused(admission, 256)
        with ExitStack() as share:
            for _ in range(8):
                share.enter_context(enter(admission, 256, tenant=B))
            refused(admission, 1, tenant=B)
            with enter(admission, 256, tenant=C):
                pass


def test_who_holds_more_than_a_share_gets_nothing_new_until_it_is_back_at_it(clock):
    admission = admission_of(8, clock)
    first = [ExitStack() for _ in range(8)]
    for stack in first:
        stack.enter_context(enter(admission))
    with enter(admission, 4, tenant=B):
        for stack in first[:4]:
            refused(admission)
            stack.close()
        refused(admission)  # 4 of 8 are its share
        first[4].close()
        with enter(admission):
            refused(admission)
    with ExitStack() as alone:  # the other tenant has left: one tenant may use everything again
        for _ in range(5):
            alone.enter_context(enter(admission))
        refused(admission)
    for stack in first:
        stack.close()
    assert in_flight(admission, A) == in_flight(admission, B) == (0, 0)


def test_many_tenants_together_hold_little_more_than_the_limit(clock):
    admission = admission_of(1024, clock)
    with ExitStack() as everybody:
        for number in range(32):
            with pytest.raises(Overloaded):
                while True:
                    everybody.enter_context(enter(admission, tenant=str(number)))
        taken = sum(in_flight(admission, str(number))[0] for number in range(32))
    assert taken <= 1024 * sum(1 / (number + 1) for number in range(32))


def test_tokens_are_counted_and_shared_like_completions(clock):
    admission = admission_of(100, clock, tokens=1000)
    with enter(admission, tokens=900):
        refused(admission, tokens=101)
        with enter(admission, tokens=100):
            assert in_flight(admission, A) == (2, 1000)
            with enter(admission, tenant=B, tokens=400):
                refused(admission, tenant=B, tokens=101)
    assert in_flight(admission, A) == (0, 0)


@pytest.mark.parametrize(("completions", "tokens"), [(256, 1), (1, 10**9)])
def test_a_request_larger_than_everything_takes_all_and_is_not_refused_for_ever(clock, completions, tokens):
    admission = admission_of(64, clock, tokens=1000)
    with enter(admission, completions, tokens=tokens):
        refused(admission, tokens=1000)
        with enter(admission, completions, tenant=B, tokens=tokens):
            pass
    with enter(admission):
        refused(admission, completions, tokens=tokens)


def test_a_tenants_own_limit_holds_for_one_that_is_alone_too_and_says_which_it_is(clock):
    admission = Admission(ResourceLimits(64, 4), ResourceLimits(0, 100), clock)
    with enter(admission, 3, tokens=60):
        for demand, quota, used, limit in (((2, 1), "completions", "3", "4"), ((1, 41), "tokens", "60", "100")):
            with pytest.raises(QuotaExceeded) as failure, enter(admission, demand[0], tokens=demand[1]):
                pass
            assert failure.value.metadata == {"quota": quota, "used": used, "limit": limit}
            assert f"max_{quota}_per_tenant" in failure.value.message
            assert failure.value.retry_after
        with enter(admission, 1, tokens=40), enter(admission, 4, tenant=B, tokens=100):
            pass
    assert [(use.name, use.limit) for use in admission.used(A)] == [("completions", 4), ("tokens", 100)]


def test_one_tenants_refusals_do_not_put_another_off(clock):
    admission = admission_of(4, clock)
    with enter(admission, 4), enter(admission, 2, tenant=B):
        assert max(refused(admission) for _ in range(1000)) > 15
        assert refused(admission, tenant=B) < 1


def test_a_refused_request_leaves_nothing_counted(clock):
    admission = admission_of(4, clock, tokens=10)
    with enter(admission, tokens=8):
        refused(admission, tokens=3)
        assert in_flight(admission, A) == (1, 8)
    assert admission.tenants() == []
