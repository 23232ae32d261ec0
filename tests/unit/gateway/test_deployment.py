"""The quotas of several services are merged into one list."""

from __future__ import annotations

from gateway.deployment import merge_quotas
from paceline.codec import quota_to_proto
from paceline.types import Quota

RUNS = Quota("runs", 3, 64)


def merged(*samplers):
    return merge_quotas([quota_to_proto(RUNS)], [[quota_to_proto(Quota("versions", *sampler))] for sampler in samplers])


def test_quotas_of_samplers_are_added_up():
    assert merged((1, 16), (2, 8)) == [RUNS, Quota("versions", 3, 24)]


def test_there_is_no_limit_where_one_sampler_has_none():
    assert merged((1, 16), (2, 0)) == [RUNS, Quota("versions", 3, 0)]


def test_services_that_are_away_are_left_out():
    assert merged() == [RUNS]
    assert merge_quotas([], []) == []
