"""What bodies of JSON may hold, and that large ones are decoded while the event loop goes on."""

from __future__ import annotations

import json
import threading

import pytest

from paceline import errors
from paceline.chat.bodies import read_chat_body
from paceline.requests.bodies import MAX_JSON_PARTS, JsonParts, decoded, depth_of

_MANY = [b"1," * MAX_JSON_PARTS, b"{}," * MAX_JSON_PARTS, b"]" * (MAX_JSON_PARTS + 1), b"\\n" * (MAX_JSON_PARTS + 1)]


@pytest.mark.parametrize("many", _MANY, ids=["numbers", "objects", "brackets", "escapes"])
def test_a_body_with_too_many_parts_is_refused_before_it_is_parsed(many):
    with pytest.raises(errors.OutOfRange, match="send less at a time"):
        read_chat_body(b'{"prompt":[' + many + b"0]}")


def test_parts_are_counted_over_the_pieces_of_a_body():
    parts = JsonParts(most=3)
    parts.add(b"[1,")
    parts.add(b"2")
    with pytest.raises(errors.OutOfRange):
        parts.add(b",3]")


def test_a_prompt_as_long_as_a_context_passes():
    assert len(read_chat_body(json.dumps({"prompt": [100_000] * 131_072}).encode())["prompt"]) == 131_072


def test_depth_is_that_of_the_brackets():
    assert depth_of(b'{"a":[[1],[2,[3]]],"b":{}}') == 4


@pytest.mark.parametrize(("size", "is_here"), [(100, True), (1 << 20, False)])
async def test_a_large_body_is_decoded_in_a_thread(size, is_here):
    assert (await decoded(size, threading.get_ident) == threading.get_ident()) is is_here
