"""Packs hold every counted token once, within the budget, and results find their way back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.types import Datum
from trainer_service.engine.packing import make_packs, plan_packs, scatter_logprobs, segment_of

CPU = torch.device("cpu")


def datum(length, *, mask=None, start=0):
    tokens = np.arange(start, start + length)
    inputs = {
        "target_tokens": tokens + 1,
        "advantages": np.zeros(length, np.float32),
    }
    if mask is not None:
        inputs["mask"] = np.asarray(mask, np.uint8)
    return Datum(tokens.astype(np.int32), inputs)


@pytest.mark.parametrize("budget", [1, 7, 16, 1000])
def test_every_sequence_is_in_one_pack_within_the_budget(budget):
    lengths = [3, 16, 5, 1, 7, 7, 2, 9, 40]
    packs = plan_packs(lengths, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[index] for index in pack) <= budget or len(pack) == 1


def test_packs_are_filled():
    assert len(plan_packs([6, 4, 5, 5, 2, 8], 10)) == 3


def test_positions_restart_and_tokens_stay_together():
    (pack,) = make_packs([datum(3, start=10), datum(2, start=50)], ["target_tokens"], 16, CPU)
    assert pack.segment_lengths == (3, 2)
    assert pack.input_ids.tolist() == [[10, 11, 12, 50, 51]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert pack.loss_inputs["target_tokens"].tolist() == [11, 12, 13, 51, 52]


def test_without_a_mask_every_position_counts_also_where_the_advantage_is_zero():
    assert segment_of(0, datum(4)).counted.tolist() == [0, 1, 2, 3]


def test_only_positions_with_mask_one_count_and_what_follows_the_last_is_not_read():
    (pack,) = make_packs([datum(6, mask=[0, 1, 0, 1, 0, 0])], ["target_tokens", "advantages"], 16, CPU)
    assert pack.counted.tolist() == [1, 3]
    assert pack.segment_lengths == (4,)
    assert pack.loss_inputs["target_tokens"].tolist() == [2, 4]
    assert pack.loss_inputs["advantages"].dtype == torch.float32


def test_a_datum_without_counted_positions_is_in_no_pack():
    packs = make_packs([datum(3, mask=[0, 0, 0]), datum(2)], ["target_tokens"], 16, CPU)
    assert [segment.index for pack in packs for segment in pack.segments] == [1]


@pytest.mark.parametrize("budget", [3, 8, 100])
def test_results_are_put_back_in_request_order(budget):
    data = [datum(3, start=0), datum(5, start=100, mask=[0, 1, 1, 0, 1]), datum(2, start=200)]
    outputs = [np.full(len(d.model_input), np.nan, np.float32) for d in data]
    for pack in make_packs(data, ["target_tokens"], budget, CPU):
        scatter_logprobs(outputs, pack, pack.loss_inputs["target_tokens"].numpy().astype(np.float32))
    np.testing.assert_array_equal(outputs[0], [1, 2, 3])
    np.testing.assert_array_equal(outputs[1], [np.nan, 102, 103, np.nan, 105])
    np.testing.assert_array_equal(outputs[2], [201, 202])
