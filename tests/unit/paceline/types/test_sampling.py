"""Stops in the forms in which callers write them."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import SamplingParams, errors


@pytest.mark.parametrize(
    ("given", "strings", "tokens"),
    [
        ({"stop": "END"}, ("END",), ()),
        ({"stop": ["END", "\n"]}, ("END", "\n"), ()),
        ({"stop": [2]}, (), (2,)),
        ({"stop": 2}, (), (2,)),
        ({"stop": [np.int32(2), "END"], "stop_token_ids": [5]}, ("END",), (5, 2)),
        ({"stop": None}, (), ()),
        ({"stop_token_ids": 2}, (), (2,)),
        ({"stop_token_ids": np.array([2, 3])}, (), (2, 3)),
    ],
)
def test_a_string_is_one_stop_and_numbers_are_token_ids(given, strings, tokens):
    params = SamplingParams(**given)
    assert (params.stop, params.stop_token_ids) == (strings, tokens)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop": [[2]]}, "stop[0]"),
        ({"stop": ["END", 0.5]}, "stop[1]"),
        ({"stop": [True]}, "stop[0]"),
        ({"stop": b"ab"}, "stop[0]"),
        ({"stop_token_ids": "END"}, "stop_token_ids[0]"),
        ({"stop_token_ids": [0.5]}, "stop_token_ids[0]"),
    ],
)
def test_what_is_neither_is_refused_by_its_place(given, field):
    with pytest.raises(errors.InvalidArgument) as caught:
        SamplingParams(**given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"), [({"stop": 2.5}, "stop[0]"), ({"stop_token_ids": None}, "stop_token_ids[0]")]
)
def test_a_stop_that_is_neither_text_nor_a_token_is_refused_alone_too(given, field):
    with pytest.raises(errors.InvalidArgument) as caught:
        SamplingParams(**given)
    assert caught.value.field == field
