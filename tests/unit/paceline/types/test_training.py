"""Datums: which positions count, how a completion becomes a datum, and what a mean divides by."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
import torch

from paceline import errors
from paceline.types import Datum, ForwardBackwardOutput, ModelInput, Reduction, TopkLogprobs


def datum(mask=None, length=4):
    inputs = {"target_tokens": np.zeros(length, np.int64)}
    return Datum(np.zeros(length, np.int32), inputs if mask is None else {**inputs, "mask": np.array(mask, np.uint8)})


@pytest.mark.parametrize(("mask", "counted"), [(None, 4), ([1, 1, 1, 1], 4), ([0, 1, 0, 1], 2), ([0, 0, 0, 0], 0)])
def test_positions_with_mask_one_count_and_all_without_a_mask(mask, counted):
    assert datum(mask).counted_positions == counted


@pytest.mark.parametrize(
    ("reduction", "count"), [(Reduction.SUM, 1), (Reduction.TOKEN_MEAN, 6), (Reduction.SEQUENCE_MEAN, 2)]
)
def test_a_mean_divides_by_what_counts(reduction, count):
    assert reduction.count([datum(), datum([0, 0, 0, 0]), datum([1, 0, 0, 1])]) == count


def test_inputs_of_a_completion_get_the_dtype_that_the_server_takes():
    made = Datum.from_completion(
        [1, 2, 3], [4, 5], logprobs=[-1, -2], sequence_ratio_mask=[1, 0], clip_low_threshold=0.9
    )
    assert made.model_input.tolist() == [1, 2, 3, 4]
    expected = {
        "target_tokens": np.array([2, 3, 4, 5], np.int64),
        "mask": np.array([0, 0, 1, 1], np.uint8),
        "logprobs": np.array([0, 0, -1, -2], np.float32),
        "sequence_ratio_mask": np.array([0, 0, 1, 0], np.uint8),
        "clip_low_threshold": np.array([0, 0, 0.9, 0.9], np.float32),
    }
    assert made.loss_fn_inputs.keys() == expected.keys()
    for name, values in expected.items():
        assert made.loss_fn_inputs[name].dtype == values.dtype
        np.testing.assert_array_equal(made.loss_fn_inputs[name], values)


def test_tensors_of_torch_become_what_the_server_takes():
    advantages = torch.tensor([0.5, 1.5], dtype=torch.bfloat16, requires_grad=True)
    made = Datum(torch.tensor([1, 2]), {"target_tokens": torch.tensor([2, 3]), "advantages": advantages})
    assert made == Datum([1, 2], {"target_tokens": [2, 3], "advantages": [0.5, 1.5]})
    completion = Datum.from_completion(torch.tensor([1]), torch.tensor([2, 3]), advantages=advantages)
    assert completion == Datum.from_completion([1], [2, 3], advantages=[0.5, 1.5])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, bool])
def test_arrays_of_floats_and_bools_become_what_the_server_takes(dtype):
    made = Datum([1, 2], {"target_tokens": [2, 3], "weights": np.array([1, 0], dtype)})
    assert made == Datum([1, 2], {"target_tokens": [2, 3], "weights": [1.0, 0.0]})


def test_an_array_of_bools_is_a_mask():
    masks = {"mask": [True, False], "sequence_ratio_mask": [False, True]}
    arrays = {name: np.array(mask) for name, mask in masks.items()}
    assert Datum([1, 2], arrays) == Datum([1, 2], masks)
    assert Datum([1, 2], arrays).loss_fn_inputs["mask"].dtype == np.uint8


def test_an_input_of_tokens_is_taken_where_token_ids_are():
    given = ModelInput.from_ints(np.array([5, 6, 7]))
    assert given.to_ints() == [5, 6, 7]
    assert given.length == 3
    assert Datum(given) == Datum([5, 6, 7])
    assert Datum.from_completion(given, ModelInput.from_ints([8])) == Datum.from_completion([5, 6, 7], [8])
    with pytest.raises(errors.InvalidDtype, match="fractions"):
        ModelInput.from_ints([1.5])


def test_other_arrays_keep_their_dtype_and_are_not_copied():
    tokens, rewards, weights = np.array([1, 2], np.int64), np.array([3, 4]), np.ones(2, np.float32)
    made = Datum(tokens, {"target_tokens": tokens, "rewards": rewards, "weights": weights})
    assert made.model_input is made.loss_fn_inputs["target_tokens"] is tokens
    assert made.loss_fn_inputs["rewards"] is rewards
    assert made.loss_fn_inputs["weights"] is weights


@pytest.mark.parametrize(
    ("make", "error", "field"),
    [
        (lambda: Datum("hello"), errors.InvalidDtype, "model_input"),
        (lambda: Datum(["hello"]), errors.InvalidDtype, "model_input"),
        (lambda: Datum(None), errors.InvalidDtype, "model_input"),
        (lambda: Datum([0.5]), errors.InvalidDtype, "model_input"),
        (lambda: Datum([[1], [2, 3]]), errors.InvalidShape, "model_input"),
        (lambda: Datum([2**40]), errors.OutOfRange, "model_input"),
        (lambda: Datum([1], {"mask": [0.5]}), errors.InvalidDtype, "loss_fn_inputs[mask]"),
        (lambda: Datum.from_completion("a", [1]), errors.InvalidDtype, "prompt"),
        (lambda: Datum.from_completion([1], "a"), errors.InvalidDtype, "completion"),
        (lambda: Datum.from_completion([1], np.array([0.5])), errors.InvalidDtype, "completion"),
        (lambda: Datum.from_completion([], [1]), errors.EmptyBatch, "prompt"),
        (lambda: Datum.from_completion([1], []), errors.EmptyBatch, "completion"),
        (lambda: Datum.from_completion([1], [2, 3], advantage=1.0), errors.UnknownField, "advantage"),
        (lambda: Datum.from_completion([1], [2, 3], advantages=[1.0]), errors.InvalidShape, "advantages"),
        (lambda: Datum.from_completion([1], [2], weight=2.0, advantages=1.0), errors.InvalidArgument, "weight"),
        (lambda: Datum.from_completion([1], [2], target_tokens=[3]), errors.InvalidArgument, "target_tokens"),
        (lambda: Datum([1], [1]), errors.InvalidArgument, "loss_fn_inputs"),
    ],
)
def test_what_is_no_datum_is_refused_by_the_name_of_its_field(make, error, field):
    with pytest.raises(error) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("mask", [0.5, 256.0], errors.InvalidDtype),
        ("mask", [0.0, float("nan")], errors.InvalidDtype),
        ("mask", [0.0, 256.0], errors.OutOfRange),
        ("mask", [0, -1], errors.OutOfRange),
        ("sequence_ratio_mask", [1, 257], errors.OutOfRange),
        ("completion", [1, 2**32 + 5], errors.OutOfRange),
        ("prompt", [1, -(2**32) + 5], errors.OutOfRange),
    ],
)
def test_a_completion_of_numbers_that_would_become_others_is_refused_whatever_holds_them(make, name, values, error):
    given = {"prompt": [1], "completion": [2, 3], name: make(values)}
    with pytest.raises(error) as caught:
        Datum.from_completion(given.pop("prompt"), given.pop("completion"), **given)
    assert type(caught.value) is error
    assert caught.value.field == name


def test_a_completion_takes_arrays_of_other_dtypes_whose_numbers_fit():
    mask, advantages = np.array([True, False]), np.array([0.5, 1.5])
    made = Datum.from_completion(np.array([1], np.uint64), np.array([2, 3], np.int64), mask=mask, advantages=advantages)
    assert made == Datum.from_completion([1], [2, 3], mask=[1, 0], advantages=[0.5, 1.5])
    with pytest.raises(errors.InvalidDtype) as caught:
        Datum.from_completion([1], [2], advantages=np.array(["much"]))
    assert caught.value.field == "advantages"


def test_a_misspelt_input_is_told_the_right_name_and_one_of_a_loss_of_ones_own_is_taken():
    with pytest.raises(errors.UnknownField, match="did you mean advantages"):
        Datum.from_completion([1], [2], advantage=1.0)
    assert Datum.from_completion([1], [2], reward=1.0).loss_fn_inputs["reward"].tolist() == [1.0]


@pytest.mark.parametrize("values", [None, [None], [2**70, None]])
def test_what_holds_no_numbers_is_told_to_be_token_ids(values):
    with pytest.raises(errors.InvalidDtype, match="holds NoneType; give a list of token ids") as caught:
        Datum.from_completion(values, [1])
    assert caught.value.field == "prompt"


def test_a_number_that_numpy_does_not_know_is_named():
    with pytest.raises(errors.InvalidDtype, match="holds Decimal; give numbers") as caught:
        Datum.from_completion([1], [2], advantages=Decimal("0.5"))
    assert caught.value.field == "advantages"


@pytest.mark.parametrize("values", [[2**70], [1, -(2**70)], [2**70, np.int64(1)]])
def test_an_integer_of_more_than_64_bits_is_out_of_range(values):
    with pytest.raises(errors.OutOfRange, match="integer of more than 64 bits") as caught:
        Datum.from_completion(values, [1])
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("text", ["Country:", ["Country:", "Capital:"], [["Country:"]], np.array(["Country:"])])
def test_text_is_told_to_be_encoded(text):
    with pytest.raises(errors.InvalidDtype, match=r"text; .*get_tokenizer\(\).encode") as caught:
        Datum.from_completion(text, [1])
    assert caught.value.field == "prompt"


def test_values_with_arrays_are_compared_by_what_they_hold():
    def make(advantages=(1.0, float("nan")), tokens=(1, 2)):
        return Datum(list(tokens), {"advantages": list(advantages)})

    assert make() == make()
    assert make() != make(advantages=(1.0, 2.0))
    assert make() != make(tokens=(1, 3))
    assert make() != Datum([1, 2])
    assert make() != Datum(np.array([1, 2], np.int64), make().loss_fn_inputs)
    assert make() != "a datum"
    assert [make()] == [make()]
    outputs = [ForwardBackwardOutput([{"logprobs": np.array([value])}], {"loss:sum": 1.0}) for value in (1.0, 1.0, 2.0)]
    assert outputs[0] == outputs[1] != outputs[2]
    tops = [TopkLogprobs(np.array([[value]]), np.array([[-1.0]])) for value in (1, 1, 2)]
    assert tops[0] == tops[1] != tops[2]
