"""Every field of a request has a bound in the contract and in its comment, and is refused beyond it."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from paceline import errors
from paceline.rpc.bounds import bounds_of, check_message, check_size, check_wire, is_map, largest, request_of
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb

_PROTO = Path(__file__).resolve().parents[4] / "proto"
_NUMBERS = {
    getattr(FieldDescriptor, f"CPPTYPE_{name}") for name in ("INT32", "INT64", "UINT32", "UINT64", "DOUBLE", "FLOAT")
}
_CREATE = trainer_pb.CreateRunRequest
_FORWARD = trainer_pb.ForwardBackwardRequest


def _requests():
    for contract in _PROTO.rglob("*_service.proto"):
        module = import_module(".".join(contract.relative_to(_PROTO).with_suffix("").parts) + "_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert request_of(f"/{service.full_name}/{method.name}") is method.input_type
                yield method.input_type


def _fields(message, seen):
    if message.full_name in seen or message.full_name.startswith("google."):
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field
        inner = field.message_type.fields_by_name["value"].message_type if is_map(field) else field.message_type
        if inner is not None:
            yield from _fields(inner, seen)


def _all_fields():
    seen: set[str] = set()
    return [field for message in _requests() for field in _fields(message, seen)]


@pytest.mark.parametrize("field", _all_fields(), ids=lambda field: field.full_name)
def test_every_field_of_a_request_has_a_bound(field):
    bounds, value = bounds_of(field), field.message_type.fields_by_name["value"] if is_map(field) else field
    assert bool(bounds.max_items) == field.is_repeated
    assert bool(bounds.max_bytes) == (value.cpp_type == FieldDescriptor.CPPTYPE_STRING)
    assert bool(bounds.max) == (value.cpp_type in _NUMBERS)


def test_bounds_stand_in_comments_as_they_stand_in_options():
    described = 0
    for contract in _PROTO.rglob("*.proto"):
        lines = contract.read_text().splitlines()
        for comment, line in pairwise(lines):
            if "(paceline.types.v1.bounds)" in line:
                stated = re.findall(r"-?\d[\d.e]*\d|\d", line.partition("bounds)")[2])
                assert comment.strip().startswith("// Bound: ")
                assert sorted(re.findall(r"-?\d[\d.e]*\d|\d", comment)) == sorted(stated), line
                described += 1
    assert described


@pytest.mark.parametrize(
    ("message", "error", "field"),
    [
        (_CREATE(lora={"rank": 8, "layers": [1] * 5000}), errors.OutOfRange, "lora.layers"),
        (_CREATE(lora={"rank": 8, "alpha": 1e308}), errors.OutOfRange, "lora.alpha"),
        (_CREATE(lora={"rank": 8, "alpha": float("nan")}), errors.NonFinite, "lora.alpha"),
        (_CREATE(base_model="m" * 300), errors.OutOfRange, "base_model"),
        (_CREATE(user_metadata={"a": "b" * 2000}), errors.OutOfRange, "user_metadata[a]"),
        (_CREATE(user_metadata={"a" * 2000: "b"}), errors.OutOfRange, "user_metadata"),
        (_CREATE(user_metadata={str(n): "b" for n in range(65)}), errors.OutOfRange, "user_metadata"),
        (trainer_pb.ListCheckpointsRequest(kind=77), errors.InvalidArgument, "kind"),
        (trainer_pb.PublishWeightsRequest(wait_for=-1), errors.InvalidArgument, "wait_for"),
        (_FORWARD(data=[{"model_input": {"shape": [2**62, 0]}}]), errors.OutOfRange, "data[0].model_input.shape[0]"),
        (_FORWARD(data=[{}, {"loss_inputs": {"w": {"dtype": 99}}}]), errors.InvalidArgument,
         "data[1].loss_inputs[w].dtype"),
        (sampler_pb.SampleRequest(params={"stop": ["x"] * 65}), errors.OutOfRange, "params.stop"),
        (sampler_pb.SampleRequest(params={"temperature": float("inf")}), errors.NonFinite, "params.temperature"),
        (sampler_pb.ListVersionsRequest(page_token="ä" * 300), errors.OutOfRange, "page_token"),
    ],
)  # fmt: skip
def test_what_is_beyond_a_bound_is_refused_by_name(message, error, field):
    with pytest.raises(error) as refused:
        check_message(message)
    assert type(refused.value) is error
    assert refused.value.field == field


def test_what_keeps_its_bounds_passes():
    check_message(_CREATE(request_id="r", lora={"rank": 8, "layers": [1] * 4096}, user_metadata={"a": "b"}))


def test_a_message_that_is_longer_than_its_fields_can_be_is_not_parsed():
    check_size(largest(_CREATE.DESCRIPTOR), _CREATE.DESCRIPTOR)
    with pytest.raises(errors.MessageTooLarge):
        check_size(largest(_CREATE.DESCRIPTOR) + 1, _CREATE.DESCRIPTOR)
    assert largest(trainer_pb.GetRunRequest.DESCRIPTOR) < 1 << 13


def _delimited(tag: int, content: bytes) -> bytes:
    size, out = len(content), bytearray((tag,))
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes(out) + bytes((size,)) + content


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x1a\x00" * 100_000, errors.OutOfRange),
        (_delimited(0x1A, b"\x12\x00" * 100_000), errors.OutOfRange),
        (_delimited(0x1A, _delimited(0x12, b"\x12\x00" * 100_000)), errors.OutOfRange),
        (bytes(1 << 17) + b"\x1a", errors.OutOfRange),
        (_delimited(0x1A, bytes(1 << 17))[:-1], errors.UnreadableMessage),
        (b"\x13" + bytes(1 << 17), errors.UnreadableMessage),
        (b"\x1a" + b"\xff" * (1 << 17), errors.UnreadableMessage),
        (b"\x08" + b"\xff" * (1 << 17), errors.UnreadableMessage),
    ],
    ids=["datums", "inputs", "tensors", "zeros", "cut", "group", "length", "number"],
)
def test_a_message_of_many_parts_is_refused_before_it_takes_their_memory(data, error):
    with pytest.raises(error):
        check_wire(data, _FORWARD.DESCRIPTOR)


def test_a_large_batch_passes_the_count():
    tensor = {"dtype": 1, "shape": [64], "data": bytes(256)}
    datum = {"model_input": tensor, "loss_inputs": {str(n): tensor for n in range(9)}}
    request = _FORWARD(run_id="r", data=[datum] * 1024)
    check_wire(request.SerializeToString(), _FORWARD.DESCRIPTOR)
    check_message(request)


def test_a_time_in_a_request_is_taken():
    """A pushed version's manifest holds its creation time."""
    push = sampler_pb.UpdateWeightsRequest()
    push.manifest.create_time.FromSeconds(1_800_000_000)
    check_message(push)
    check_size(push.ByteSize(), push.DESCRIPTOR)
