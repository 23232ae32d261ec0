"""How requests are checked before an engine sees them."""

from __future__ import annotations

import pytest

from paceline.errors import OutOfRange, SequenceTooLong, TokenOutOfRange
from paceline.types import ModelInfo, SamplingParams
from sampler_service.engine.request_checks import check_tokens, completion_budget

INFO = ModelInfo("m", max_context_length=10, vocab_size=5, dtype="float32", max_lora_rank=4, num_layers=1)


def test_tokens_must_be_in_the_vocabulary_and_leave_room():
    check_tokens(INFO, [0, 4] * 5, "tokens")
    for error, tokens in [(TokenOutOfRange, [5]), (TokenOutOfRange, [-1]), (SequenceTooLong, [0] * 10)]:
        with pytest.raises(error) as caught:
            check_tokens(INFO, tokens, "prompt", room=1)
        assert caught.value.field == "prompt"


def test_the_budget_is_what_the_context_leaves():
    assert completion_budget(INFO, 4, SamplingParams()) == 6
    assert completion_budget(INFO, 4, SamplingParams(max_tokens=99)) == 6
    assert completion_budget(INFO, 4, SamplingParams(max_tokens=2, min_tokens=2)) == 2
    for params in (SamplingParams(max_tokens=0), SamplingParams(min_tokens=7)):
        with pytest.raises(OutOfRange):
            completion_budget(INFO, 4, params)
