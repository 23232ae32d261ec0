"""The sampling maths of the hf engine, against distributions computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.types import SamplingParams
from sampler_service.engine.hf.sampling import draw, processed_logprobs, sequence_logprobs, topk_rows

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1])


def kept(probs: torch.Tensor, **params: float) -> list[float]:
    return processed_logprobs(probs.log()[None], [SamplingParams(**params)]).exp()[0].tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        # top_p sees what top_k left: 2/3 is not yet 0.7, so both stay.
        ({"top_k": 2, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        # Filters act after temperature: 0.25 / 0.345 reaches 0.7 alone.
        ({"temperature": 0.5, "top_p": 0.7}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_filters_leave_a_normalised_distribution(params, expected):
    assert kept(PROBS, **params) == pytest.approx(expected, abs=1e-6)


def test_top_k_keeps_ties():
    assert kept(torch.tensor([0.4, 0.3, 0.3]), top_k=2) == pytest.approx([0.4, 0.3, 0.3])


def test_a_greedy_row_ignores_filters_and_is_reported_at_temperature_1():
    assert kept(PROBS, temperature=0.0, top_k=1, min_p=0.9) == pytest.approx(PROBS.tolist())


def test_rows_keep_their_own_parameters():
    rows = [SamplingParams(top_k=1), SamplingParams(temperature=2.0), SamplingParams(temperature=0.0)]
    together = processed_logprobs(PROBS.log().repeat(3, 1), rows)
    alone = [processed_logprobs(PROBS.log()[None], [row])[0] for row in rows]
    assert torch.equal(together, torch.stack(alone))


def test_draw_follows_the_distribution_and_never_takes_what_was_filtered():
    logprobs = processed_logprobs(PROBS.log()[None], [SamplingParams(top_k=3)])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([draw(logprobs, [generator])[0] for _ in range(4000)])
    frequencies = torch.bincount(drawn, minlength=4) / 4000
    assert frequencies[3] == 0
    assert frequencies.tolist() == pytest.approx(logprobs.exp()[0].tolist(), abs=0.03)


def test_a_row_draws_the_same_whoever_its_neighbours_are():
    logprobs = PROBS.log().repeat(3, 1)
    together = draw(logprobs, [None, torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)])
    alone = draw(logprobs[:1], [torch.Generator().manual_seed(7)])
    assert together[0] == 0
    assert together[1] == alone[0]


def test_topk_rows_pads_where_fewer_tokens_are_left():
    rows = topk_rows(processed_logprobs(PROBS.log()[None], [SamplingParams(top_k=2)]), 6)
    assert rows.token_ids.tolist() == [[0, 1, -1, -1, -1, -1]]
    np.testing.assert_allclose(rows.logprobs[0, :2], np.log([2 / 3, 1 / 3]), rtol=1e-5)
    assert np.isnan(rows.logprobs[0, 2:]).all()


def test_sequence_logprobs_reads_row_i_for_token_i_plus_1_across_chunks():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 11, generator=generator)
    tokens = torch.randint(11, (600,), generator=generator)
    logprobs, topk = sequence_logprobs(logits, tokens, 2)
    expected = logits.double().log_softmax(-1)
    assert torch.isnan(logprobs[0])
    np.testing.assert_allclose(logprobs[1:], expected[torch.arange(599), tokens[1:]], atol=1e-6)
    assert topk is not None
    assert topk.token_ids[0].tolist() == [-1, -1]
    np.testing.assert_array_equal(topk.token_ids[1:], expected[:-1].topk(2).indices)
