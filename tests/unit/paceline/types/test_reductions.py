"""Merging the metrics of several passes."""

import pytest

from paceline import errors
from paceline.types.reductions import merge_metrics


def test_metrics_are_reduced_as_their_names_say():
    merged = merge_metrics(
        [
            {"loss:sum": 1.0, "tokens:sum": 10.0, "own:mean": 1.0, "low:min": 3.0, "high:max": 3.0},
            {"loss:sum": 2.0, "tokens:sum": 30.0, "own:mean": 5.0, "low:min": 2.0, "high:max": 7.0},
        ]
    )
    assert merged == {"loss:sum": 3.0, "tokens:sum": 40.0, "own:mean": 4.0, "low:min": 2.0, "high:max": 7.0}


def test_a_part_without_tokens_does_not_count_in_a_mean():
    parts = [{"tokens:sum": 0.0, "own:mean": float("nan")}, {"tokens:sum": 4.0, "own:mean": 2.0}]
    assert merge_metrics(parts)["own:mean"] == 2.0


def test_a_mean_over_positions_with_an_advantage_is_weighted_by_their_number():
    parts = [
        {"tokens:sum": 100.0, "advantage_tokens:sum": 1.0, "ratio:mean": 1.0},
        {"tokens:sum": 4.0, "advantage_tokens:sum": 3.0, "ratio:mean": 5.0},
        {"tokens:sum": 9.0, "advantage_tokens:sum": 0.0},
    ]
    assert merge_metrics(parts) == {"tokens:sum": 113.0, "advantage_tokens:sum": 4.0, "ratio:mean": 4.0}


def test_a_reduction_that_cannot_be_merged_is_an_error():
    with pytest.raises(errors.Internal) as caught:
        merge_metrics([{"loss:median": 1.0}, {"loss:median": 2.0}])
    assert caught.value.field == "metrics[loss:median]"
