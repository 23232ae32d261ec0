"""Datums: what counts in them, how a completion becomes one, and what a mean over them divides by."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.types import Datum, Reduction


def datum(mask=None, length=4):
    inputs = {"target_tokens": np.zeros(length, np.int64)}
    return Datum(np.zeros(length, np.int32), inputs if mask is None else {**inputs, "mask": np.array(mask, np.uint8)})


@pytest.mark.parametrize(("mask", "counted"), [(None, 4), ([1, 1, 1, 1], 4), ([0, 1, 0, 1], 2), ([0, 0, 0, 0], 0)])
def test_positions_with_mask_one_count_and_all_without_a_mask(mask, counted):
    assert datum(mask).counted_positions == counted


@pytest.mark.parametrize(
    ("reduction", "count"), [(Reduction.SUM, 1), (Reduction.TOKEN_MEAN, 6), (Reduction.SEQUENCE_MEAN, 2)]
)
def test_a_mean_divides_by_what_counts(reduction, count):
    assert reduction.count([datum(), datum([0, 0, 0, 0]), datum([1, 0, 0, 1])]) == count


def test_inputs_of_a_completion_get_the_dtype_that_the_server_takes():
    made = Datum.from_completion(
        [1, 2, 3], [4, 5], logprobs=[-1, -2], sequence_ratio_mask=[1, 0], clip_low_threshold=0.9
    )
    assert made.model_input.tolist() == [1, 2, 3, 4]
    expected = {
        "target_tokens": np.array([2, 3, 4, 5], np.int64),
        "mask": np.array([0, 0, 1, 1], np.uint8),
        "logprobs": np.array([0, 0, -1, -2], np.float32),
        "sequence_ratio_mask": np.array([0, 0, 1, 0], np.uint8),
        "clip_low_threshold": np.array([0, 0, 0.9, 0.9], np.float32),
    }
    assert made.loss_inputs.keys() == expected.keys()
    for name, values in expected.items():
        assert made.loss_inputs[name].dtype == values.dtype
        np.testing.assert_array_equal(made.loss_inputs[name], values)
