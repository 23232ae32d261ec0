"""Batches as they arrive: what a small compressed body may expand to."""

from __future__ import annotations

import pytest
import zstandard

from gateway.http.tinker.api import _read
from paceline import errors
from paceline.tinker.v1 import tinker_pb2


def test_a_small_body_that_expands_to_millions_of_empty_messages_is_refused_before_it_is_parsed():
    body = zstandard.compress(b"\x1a\x00" * (16 << 20))
    assert len(body) < 4096
    with pytest.raises(errors.OutOfRange, match="too many fields"):
        _read(body, "zstd", 32 << 20)


def test_a_batch_of_as_many_datums_as_the_trainer_takes_is_read():
    chunk = tinker_pb2.Chunk(encoded_text=tinker_pb2.EncodedTextChunk(tokens=bytes(4096)))
    tensor = tinker_pb2.Tensor(dense=bytes(8192), dtype=2, shape=[1024])
    inputs = dict.fromkeys(("target_tokens", "logprobs", "advantages", "mask"), tensor)
    datum = tinker_pb2.Datum(model_input=[chunk], loss_fn_inputs=inputs)
    batch = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum] * 512)
    assert _read(zstandard.compress(batch.SerializeToString()), "zstd", 32 << 20) == batch
