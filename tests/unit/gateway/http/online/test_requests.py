"""What requests for online training may hold."""

from __future__ import annotations

import json

import pytest

from gateway.http.online.requests import CheckpointRequest, read
from paceline import errors


@pytest.mark.parametrize("name", ["", "a b", "abc\n", "x" * 65, "../x"])
def test_a_model_name_of_other_characters_is_refused_by_its_field(name):
    with pytest.raises(errors.InvalidArgument) as refusal:
        read(json.dumps({"model": name}).encode(), CheckpointRequest)
    assert refusal.value.field == "model"
