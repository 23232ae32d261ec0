"""Rows of metrics as curves."""

from datetime import UTC, datetime

import numpy as np
import pytest

from paceline import Metrics, MetricsRow, Rollout, RowSource

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def rows(*steps_and_values):
    numbered = enumerate(steps_and_values, start=1)
    return [MetricsRow(number, step, NOW, values, RowSource.TRAINER) for number, (step, values) in numbered]


def test_rows_of_a_step_are_joined_and_later_values_win():
    metrics = Metrics(rows((1, {"a": 1.0}), (2, {"a": 2.0, "b": 5.0}), (1, {"a": 3.0, "c": 4.0})))
    assert metrics.steps.tolist() == [1, 2]
    assert sorted(metrics) == ["a", "b", "c"]
    np.testing.assert_array_equal(metrics["a"], [3.0, 2.0])
    np.testing.assert_array_equal(metrics["b"], [np.nan, 5.0])
    assert len(metrics.rows) == 3
    assert "a" in metrics
    assert "d" not in metrics
    assert repr(metrics) == "<Metrics of 2 steps, 1 to 2; last: a 3, b 5, c 4>"


def test_no_rows_are_no_curves():
    assert dict(Metrics([])) == {}
    assert repr(Metrics([])) == "<Metrics without rows>"
    with pytest.raises(KeyError, match="no values"):
        Metrics([])["a"]


def test_a_name_that_no_step_has_names_similar_ones():
    with pytest.raises(KeyError, match="loss:mean"):
        Metrics(rows((1, {"loss:mean": 1.0, "tokens": 2.0})))["loss_mean"]


def test_a_rollout_keeps_further_arguments_as_text():
    rollout = Rollout("p", reward=1.0, env="sums", attempt=2)
    assert (rollout.prompt, rollout.completion, rollout.reward) == ("p", "", 1.0)
    assert rollout.extras == {"env": "sums", "attempt": "2"}
    assert rollout == Rollout.with_extras("p", "", 1.0, {"env": "sums", "attempt": "2"})
