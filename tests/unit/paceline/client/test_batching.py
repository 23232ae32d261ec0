"""Splitting a batch into requests and merging the answers."""

from itertools import pairwise

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from paceline import Datum, ModelInput, codec, errors
from paceline.client.batching import MAX_BYTES, MAX_DATUMS, Batch, make_batch, split
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import ForwardBackwardSpec, Reduction


def datum_of(length):
    tokens = np.arange(length, dtype=np.int32)
    return Datum(tokens, {"target_tokens": tokens.astype(np.int64)})


def batch_of(lengths):
    return make_batch([datum_of(length) for length in lengths], ForwardBackwardSpec("cross_entropy"))


def reply(*values, **metrics):
    outputs = [codec.output_to_proto({"logprobs": np.array([value], np.float32)}) for value in values]
    return pb.ForwardBackwardResponse(outputs=outputs, metrics={key.replace("_", ":"): metrics[key] for key in metrics})


SIZES = st.lists(st.integers(1, MAX_BYTES // 3) | st.integers(1, 2 * MAX_BYTES), max_size=60)


@given(SIZES)
def test_parts_hold_every_datum_in_order_and_stay_below_the_limit(sizes):
    parts = list(split(sizes))
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    for part in parts:
        assert len(part) == 1 or sum(sizes[index] for index in part) <= MAX_BYTES


@given(SIZES)
def test_no_part_could_have_taken_the_next_datum(sizes):
    parts = list(split(sizes))
    for present, following in pairwise(parts):
        assert sum(sizes[index] for index in [*present, following[0]]) > MAX_BYTES


def test_requests_of_long_datums_stay_below_the_limit():
    requests = batch_of([150_000] * 5).requests
    assert [len(request.data) for request in requests] == [2, 2, 1]
    assert all(request.ByteSize() <= MAX_BYTES for request in requests)


def test_a_part_holds_at_most_1024_datums():
    assert MAX_DATUMS == 1024
    assert [len(request.data) for request in batch_of([1] * 2049).requests] == [1024, 1024, 1]


@pytest.mark.parametrize(
    ("data", "field", "remedy"),
    [
        (datum_of(2), "data", r"is one Datum; give a list of them, \[datum\]"),
        (None, "data", "is a NoneType; give a list of Datum"),
        ({"model_input": [1]}, "data", "is a dict; give a list of Datum"),
        ("text", "data", "is a str; give a list of Datum"),
        ([datum_of(2), [1, 2]], r"data[1]", r"is a list; give a Datum, such as Datum.from_completion"),
        ([[datum_of(2)]], r"data[0]", "is a list; give a Datum"),
    ],
)
def test_what_is_no_list_of_datums_is_refused_with_its_place_and_what_to_give(data, field, remedy):
    with pytest.raises(errors.InvalidArgument, match=remedy) as caught:
        make_batch(data, ForwardBackwardSpec("cross_entropy"))
    assert caught.value.field == field


def test_every_part_carries_the_settings():
    data = [datum_of(1)] * 1025
    for request in make_batch(
        data, ForwardBackwardSpec("ppo", {"clip_low_threshold": 0.8}, forward_only=True)
    ).requests:
        assert (request.loss_fn, request.forward_only) == ("ppo", True)
        assert request.loss_fn_config == {"clip_low_threshold": 0.8}


@pytest.mark.parametrize(("reduction", "count"), [(Reduction.TOKEN_MEAN, 2048), (Reduction.SEQUENCE_MEAN, 1025)])
def test_every_part_is_told_what_the_mean_over_the_whole_batch_divides_by(reduction, count):
    data = [datum_of(2) for _ in range(1026)]
    data[0].loss_fn_inputs["mask"] = np.array([0, 0], np.uint8)
    data[1].loss_fn_inputs["mask"] = np.array([0, 1], np.uint8)
    data[2].loss_fn_inputs["mask"] = np.array([1, 0], np.uint8)
    requests = make_batch(data, ForwardBackwardSpec("cross_entropy", reduction=reduction)).requests
    assert [(part.reduction, part.reduction_count) for part in requests] == [(reduction.value, count)] * 2


def test_a_sum_is_divided_by_nothing():
    (request,) = batch_of([1]).requests
    assert request.reduction == pb.REDUCTION_SUM
    assert not request.HasField("reduction_count")


def test_an_empty_batch_is_refused():
    with pytest.raises(errors.EmptyBatch) as caught:
        batch_of([])
    assert caught.value.field == "data"


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [
        ("model_input", np.float64, "int32 or int64"),
        ("loss_fn_inputs[target_tokens]", np.float64, "int32 or int64"),
        ("loss_fn_inputs[mask]", np.float64, "uint8"),
        ("loss_fn_inputs[advantages]", np.complex64, "float32"),
    ],
)
def test_a_dtype_that_cannot_be_sent_is_refused_with_the_field_and_what_it_takes(name, dtype, wanted):
    wrong = datum_of(3)
    if name == "model_input":
        wrong.model_input = np.zeros(3, dtype)
    else:
        wrong = Datum(wrong.model_input, {name[len("loss_fn_inputs[") : -1]: np.zeros(3, dtype)})
    with pytest.raises(errors.InvalidDtype, match=rf"dtype {np.dtype(dtype)} cannot be sent; give {wanted}$") as caught:
        make_batch([datum_of(3), wrong], ForwardBackwardSpec("ppo"))
    assert caught.value.field == f"data[1].{name}"


def test_a_setting_that_is_no_number_is_refused_by_the_name_of_its_field():
    with pytest.raises(errors.InvalidArgument) as caught:
        make_batch([datum_of(1)], ForwardBackwardSpec("ppo", {"clip_low_threshold": "low"}))
    assert caught.value.field == "loss_fn_config[clip_low_threshold]"


def test_outputs_are_put_together_in_order():
    batch = Batch([], [2, 1])
    merged = batch.merge([reply(1, 2, loss_sum=1), reply(3, loss_sum=4)])
    assert [float(output["logprobs"][0]) for output in merged.loss_fn_outputs] == [1, 2, 3]
    assert merged.metrics == {"loss:sum": 5}


def test_a_datum_of_tinkers_is_taken_as_it_is():
    targets, weights = tinker.TensorData([2, 3], "int64"), tinker.TensorData.from_numpy(np.ones(2, np.float32))
    inputs = {"target_tokens": targets, "weights": weights}
    theirs = tinker.Datum(tinker.ModelInput.from_ints([1, 2]), inputs)
    ours = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1, 1]})
    spec = ForwardBackwardSpec("cross_entropy")
    assert make_batch([theirs], spec) == make_batch([ours], spec)


def test_a_datum_of_tinkers_with_an_image_is_refused_by_the_name_of_its_field():
    chunk = tinker.types.ImageAssetPointerChunk(location="picture", format="png", expected_tokens=3)
    theirs = tinker.Datum(tinker.ModelInput(chunks=[chunk]))
    with pytest.raises(errors.InvalidArgument) as caught:
        make_batch([theirs], ForwardBackwardSpec("cross_entropy"))
    assert caught.value.field == "data[0].model_input"


def test_a_failure_of_one_part_names_the_input_as_datum_does():
    failure = errors.NonFinite("is NaN", field="data[0].loss_inputs[weights]")
    with pytest.raises(errors.NonFinite) as caught:
        batch_of([1]).merge([failure])
    assert caught.value.field == "data[0].loss_fn_inputs[weights]"


def test_the_first_failure_is_raised():
    batch = batch_of([1] * 1025)
    failure = errors.NonFinite("is NaN", field="data[0].loss_inputs[weights]")
    with pytest.raises(errors.NonFinite) as caught:
        batch.merge([reply(*[0.0] * 1024), failure])
    assert caught.value.field == "data[1024].loss_fn_inputs[weights]"


def test_every_part_asks_to_be_refused_where_the_batch_does():
    batch = make_batch([datum_of(4)] * (MAX_DATUMS + 1), ForwardBackwardSpec("cross_entropy", refuse_non_finite=True))
    assert [request.refuse_non_finite for request in batch.requests] == [True, True]
