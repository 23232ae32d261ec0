"""What requests for online training may hold."""

from __future__ import annotations

import json

import msgspec
import pytest

from gateway.http.online.requests import CheckpointRequest, Pair, TrainRequest, read
from paceline import errors


@pytest.mark.parametrize("name", ["", "a b", "abc\n", "x" * 65, "../x"])
def test_a_model_name_of_other_characters_is_refused_by_its_field(name):
    with pytest.raises(errors.InvalidArgument) as refusal:
        read(json.dumps({"model": name}).encode(), CheckpointRequest)
    assert refusal.value.field == "model"


@pytest.mark.parametrize("optimizer", ["sgd", 3])
def test_an_unknown_optimizer_is_told_the_known_ones(optimizer):
    with pytest.raises(errors.InvalidArgument, match="is one of apollo_mini, apollo, adamw, ") as refusal:
        read(json.dumps({"optimizer": optimizer}).encode(), TrainRequest)
    assert refusal.value.field == "optimizer"


@pytest.mark.parametrize(
    ("place", "field"),
    [
        ("conversations[1].messages[0].content", "conversations[1].messages[0].content"),
        ("conversations[2].messages[0].content", "pairs[0].prompt"),
        ("conversations[3].messages[1].content", "pairs[1].response"),
        ("conversations[3].messages[1]", "pairs[1].response"),
        ("conversations[3].messages", "pairs[1]"),
        ("conversations[3]", "pairs[1]"),
        ("conversations", "conversations"),
        ("", ""),
    ],
)
def test_an_error_in_a_pair_names_the_pair(place, field):
    conversation = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).encode()
    pairs = [Pair("a", "b"), Pair("a", "b")]
    request = TrainRequest(conversations=[msgspec.Raw(conversation)] * 2, pairs=pairs)
    assert len(request.bodies()) == 4
    assert request.field_of(place) == field
