"""Packs hold every counted token once, within the budget, and results return to request order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.types import Datum
from trainer_service.engine.microbatch.job import Datums, PackedSegment, scatter_logprobs, segment_of
from trainer_service.engine.microbatch.scheduler import Scheduler

CPU = torch.device("cpu")
INPUTS = ["target_tokens", "advantages"]


@dataclass
class Demand:
    waiting: list[list[PackedSegment]]
    run_id: str = "run"
    forward_only: bool = False
    alone: bool = False


def datum(length, *, mask=None, start=0):
    tokens = np.arange(start, start + length)
    inputs = {
        "target_tokens": tokens + 1,
        "advantages": np.zeros(length, np.float32),
    }
    if mask is not None:
        inputs["mask"] = np.asarray(mask, np.uint8)
    return Datum(tokens.astype(np.int32), inputs)


def packs_of(data, budget):
    """Pack a single batch as the engine does."""
    batch, scheduler = Datums(data, INPUTS), Scheduler(budget)
    demand, packs = Demand(batch.segments()), []
    while shares := scheduler.next_passes([demand])[0]:
        packs += [batch.pack(segments, CPU) for _, segments in shares]
    return packs


@pytest.mark.parametrize("budget", [1, 7, 16, 1000])
def test_every_sequence_is_in_one_pack_within_the_budget(budget):
    packs = packs_of([datum(length) for length in (3, 16, 5, 1, 7, 7, 2, 9, 40)], budget)
    assert sorted(segment.index for pack in packs for segment in pack.segments) == list(range(9))
    for pack in packs:
        assert sum(pack.segment_lengths) <= budget or len(pack.segments) == 1


def test_packs_are_filled_first_fit_by_decreasing_length():
    packs = packs_of([datum(length) for length in (6, 4, 5, 5, 2, 8, 30)], 10)
    assert [pack.segment_lengths for pack in packs] == [(30,), (8, 2), (6, 4), (5, 5)]


def test_positions_restart_and_tokens_stay_together():
    (pack,) = packs_of([datum(3, start=10), datum(2, start=50)], 16)
    assert pack.segment_lengths == (3, 2)
    assert pack.input_ids.tolist() == [[10, 11, 12, 50, 51]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert pack.loss_fn_inputs["target_tokens"].tolist() == [11, 12, 13, 51, 52]


def test_without_a_mask_every_position_counts_also_where_the_advantage_is_zero():
    assert segment_of(0, datum(4)).counted.tolist() == [0, 1, 2, 3]


def test_only_positions_with_mask_one_count_and_what_follows_the_last_is_not_read():
    (pack,) = packs_of([datum(6, mask=[0, 1, 0, 1, 0, 0])], 16)
    assert pack.counted.tolist() == [1, 3]
    assert pack.segment_lengths == (4,)
    assert pack.loss_fn_inputs["target_tokens"].tolist() == [2, 4]
    assert pack.loss_fn_inputs["advantages"].dtype == torch.float32


def test_a_datum_without_counted_positions_is_in_no_pack():
    packs = packs_of([datum(3, mask=[0, 0, 0]), datum(2)], 16)
    assert [segment.index for pack in packs for segment in pack.segments] == [1]


@pytest.mark.parametrize("budget", [3, 8, 100])
def test_results_are_put_back_in_request_order(budget):
    data = [datum(3, start=0), datum(5, start=100, mask=[0, 1, 1, 0, 1]), datum(2, start=200)]
    outputs = [np.zeros(len(d.model_input), np.float32) for d in data]
    for pack in packs_of(data, budget):
        scatter_logprobs(outputs, pack, pack.loss_fn_inputs["target_tokens"].numpy().astype(np.float32))
    np.testing.assert_array_equal(outputs[0], [1, 2, 3])
    np.testing.assert_array_equal(outputs[1], [0, 102, 103, 0, 105])
    np.testing.assert_array_equal(outputs[2], [201, 202])
