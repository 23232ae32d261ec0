"""Tinker's arrays as its own SDK writes and reads them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies
from tinker import types
from tinker.proto import response_conv
from tinker.proto import tinker_public_pb2 as sdk_pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from gateway.http.tinker import tensors
from paceline import codec, errors
from paceline.tinker.v1 import tinker_pb2
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import SampledSequence, SampleResult, ServedModel, StopReason, TopkLogprobs


def translated(data, loss_fn="ppo", **config):
    """Return the request that the trainer gets for what the SDK sends."""
    body = types.ForwardBackwardRequest(
        model_id="m", seq_id=1, forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn)
    )
    written = forward_backward_request_to_proto(body)
    written = written if hasattr(written, "SerializeToString") else sdk_pb.ForwardBackwardRequest.FromString(written)
    for name, value in config.items():
        written.loss_fn_config_v2[name].number = value
    read = tinker_pb2.ForwardBackwardRequest.FromString(written.SerializeToString())
    return tensors.forward_backward_request(read, "run", 7)


def array(tensor):
    return codec.tensor_from_proto(tensor, "x", {"float32", "int64", "int32", "uint8"}, ndim=range(4))


@given(
    tokens=strategies.lists(strategies.integers(0, 2**31 - 1), min_size=1, max_size=30),
    floats=strategies.lists(strategies.floats(width=32, allow_nan=False), min_size=1, max_size=30),
)
def test_tokens_and_floats_arrive_as_they_were(tokens, floats):
    datum = types.Datum(
        model_input=types.ModelInput(
            chunks=[types.EncodedTextChunk(tokens=tokens[:1]), types.EncodedTextChunk(tokens=tokens[1:])]
        ),
        loss_fn_inputs={"advantages": types.TensorData(data=floats, dtype="float32", shape=[len(floats)])},
    )
    (found,) = translated([datum], clip_low_threshold=0.5).data
    assert array(found.model_input).tolist() == tokens
    assert array(found.loss_inputs["advantages"]).tolist() == np.array(floats, np.float32).tolist()


def test_sparse_arrays_get_their_zeros():
    dense = np.zeros((4, 3), np.float32)
    dense[1, 2], dense[3, 0] = 0.5, 2.0
    sparse = types.TensorData(
        data=[0.5, 2.0], dtype="float32", shape=[4, 3], sparse_crow_indices=[0, 0, 1, 1, 2], sparse_col_indices=[2, 0]
    )
    targets = types.TensorData(data=list(range(12)), dtype="int64", shape=[4, 3])
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"weights": sparse, "target_tokens": targets},
    )
    (found,) = translated([datum], "cross_entropy").data
    assert array(found.loss_inputs["weights"]).tolist() == dense.tolist()
    assert array(found.loss_inputs["target_tokens"]).shape == (4, 3)


def _sparse(shape, crow, col):
    def packed(values):
        return np.array(values, "<i8").tobytes()

    values = np.ones(len(col), "<f4").tobytes()
    sparse = tinker_pb2.SparseCsr(values=values, crow_indices=packed(crow), col_indices=packed(col))
    return tinker_pb2.Tensor(sparse_csr=sparse, dtype=1, shape=shape)


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        ("weights", tinker_pb2.Tensor(dense=b"", dtype=9, shape=[0]), errors.InvalidDtype),
        ("mask", tinker_pb2.Tensor(dense=b"123", dtype=1, shape=[1]), errors.InvalidShape),
        ("mask", tinker_pb2.Tensor(dense=bytes(8), dtype=1, shape=[3]), errors.InvalidShape),
        ("weights", _sparse([2, 2], [0, 1, 2], [0, 2]), errors.InvalidShape),
        ("weights", _sparse([2, 2], [0, 1, 2], [0, -1]), errors.InvalidShape),
        ("weights", _sparse([2, 2], [0, 2, 1], [0, 1]), errors.InvalidShape),
        ("weights", _sparse([2, 2], [0, 2], [0, 1]), errors.InvalidShape),
        ("weights", _sparse([2], [0, 1, 2], [0, 1]), errors.InvalidShape),
        ("weights", _sparse([10**9, 10**9], [0], []), errors.InvalidShape),
        ("weights", _sparse([1, 1 << 30], [0, 0], []), errors.OutOfRange),
        ("weights", _sparse([-1, 2], [0], []), errors.InvalidShape),
    ],
)
def test_arrays_that_are_none_are_refused(name, tensor, error):
    chunk = tinker_pb2.Chunk(encoded_text=tinker_pb2.EncodedTextChunk(tokens=bytes(8)))
    request = tinker_pb2.ForwardBackwardRequest(
        data=[tinker_pb2.Datum(model_input=[chunk], loss_fn_inputs={name: tensor})], loss_fn="ppo"
    )
    with pytest.raises(error):
        tensors.forward_backward_request(request, "run", 1)


def test_images_are_refused():
    image = sdk_pb.Chunk(image=sdk_pb.ImageChunk(data=b"png", format="png"))
    written = sdk_pb.ForwardBackwardRequest(data=[sdk_pb.Datum(model_input=[image])]).SerializeToString()
    with pytest.raises(errors.Unsupported, match=r"model_input\[0\]|image"):
        tensors.forward_backward_request(tinker_pb2.ForwardBackwardRequest.FromString(written), "run", 1)


def test_outputs_of_datums_of_any_shape_are_read_by_the_sdk():
    arrays = [np.arange(3), np.arange(8).reshape(4, 2), np.arange(6).reshape(2, 3), np.arange(2)]
    outputs = [codec.output_to_proto({"logprobs": one.astype(np.float32)}) for one in arrays]
    reply = trainer_pb.ForwardBackwardResponse(outputs=outputs, metrics={"loss:sum": 2.5})
    read = response_conv.deserialize_forward_backward_output(tensors.forward_backward_output(reply))
    assert read.metrics == {"loss:sum": 2.5}
    found = [np.array(one["logprobs"].data).reshape(one["logprobs"].shape) for one in read.loss_fn_outputs]
    assert [one.tolist() for one in found] == [one.tolist() for one in arrays]


def test_samples_are_read_by_the_sdk():
    topk = TopkLogprobs(
        np.array([[-1, -1], [4, -1]], np.int32), np.array([[np.nan, np.nan], [-1.0, np.nan]], np.float32)
    )
    sequence = SampledSequence(
        tokens=np.array([4, 2], np.int32),
        logprobs=np.array([-1.0, -2.0], np.float32),
        stop_reason=StopReason.LENGTH,
        topk_logprobs=topk,
    )
    prompt = np.array([np.nan, -1.0, -2.0], np.float32)
    result = SampleResult([sequence], ServedModel("m"), prompt, None, 3)
    read = response_conv.deserialize_sample_response(tensors.sample_response(result, last_n=1))
    assert read.sequences[0].stop_reason == "length"
    assert list(read.sequences[0].tokens) == [4, 2]
    assert read.prompt_logprobs == [None, None, -2.0]
    assert read.prompt_cache_hit_tokens == 3


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([], errors.EmptyBatch),
        ([{"type": "image"}], errors.Unsupported),
        ([{"tokens": "abc"}], errors.InvalidArgument),
        ([{"tokens": [1, True]}], errors.InvalidArgument),
        ([{"tokens": [1.5]}], errors.InvalidArgument),
        ([{"tokens": [-1]}], errors.TokenOutOfRange),
        ([{"tokens": [2**31]}], errors.TokenOutOfRange),
    ],
)
def test_prompts_that_are_none_are_refused(chunks, error):
    with pytest.raises(error):
        tensors.prompt_tokens(chunks)


def test_a_setting_that_is_no_number_is_refused_by_its_name():
    request = tinker_pb2.ForwardBackwardRequest(loss_fn_config_v2={"beta": {}})
    with pytest.raises(errors.InvalidArgument) as caught:
        tensors.forward_backward_request(request, "run", 7)
    assert caught.value.field == "loss_fn_config[beta]"
