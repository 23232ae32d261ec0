"""Checks of a batch: what is refused says what the loss needs."""

import numpy as np
import pytest

from paceline import errors
from paceline.types import Datum, ForwardBackwardSpec, LoraConfig, ModelInfo
from trainer_service.validation import check_base_model, check_batch, check_lora, check_request_id

MODEL = ModelInfo("tiny", 64, 100, "float32", 8, 2)


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (ForwardBackwardSpec("ppo"), "logprobs and advantages"),
        (ForwardBackwardSpec("grpo", {"kl_coef": 0.1}), "logprobs and advantages and reference_logprobs"),
    ],
)
def test_a_datum_for_another_loss_is_told_what_it_lacks_and_then_what_it_has_too_much(spec, missing):
    told = f"needs {missing}; send one value per token, and leave out weights, which it does not have$"
    with pytest.raises(errors.MissingField, match=told) as caught:
        check_batch([Datum.from_completion([1, 2], [3])], spec, MODEL, 1)
    assert caught.value.field == "data[0].loss_inputs[logprobs]"


def test_a_datum_with_weights_in_place_of_advantages_is_told_that_these_are_missing():
    datum = Datum.from_completion([1, 2], [3], logprobs=-1.0, weights=1.0)
    with pytest.raises(errors.MissingField, match=r"needs advantages; .* leave out weights") as caught:
        check_batch([datum], ForwardBackwardSpec("importance_sampling"), MODEL, 1)
    assert caught.value.field == "data[0].loss_inputs[advantages]"


@pytest.mark.parametrize(
    ("name", "held"), [("model_input", "-1 at position 1"), ("target_tokens", "100 at position 2")]
)
def test_a_token_out_of_range_is_named_with_its_position_and_the_vocabulary(name, held):
    datum = Datum.from_completion([1, 2], [3, 4])
    values = {"model_input": datum.model_input, "target_tokens": datum.loss_fn_inputs["target_tokens"]}
    values[name][int(held[-1])] = int(held.split()[0])
    with pytest.raises(errors.TokenOutOfRange, match=f"holds {held}; .* 100 tokens, with ids from 0 to 99$") as caught:
        check_batch([datum], ForwardBackwardSpec("cross_entropy"), MODEL, 1)
    assert name in caught.value.field


@pytest.mark.parametrize("per", ["run", "client that attaches"])
def test_a_request_id_that_is_not_set_is_told_for_what_to_generate_one(per):
    with pytest.raises(errors.MissingField, match=f"generate one per {per}, .* when the call is repeated") as caught:
        check_request_id("", per)
    assert caught.value.field == "request_id"


def test_a_range_of_one_number_is_told_as_that_number():
    one_rank = ModelInfo("tiny", 64, 100, "float32", 1, 2)
    with pytest.raises(errors.OutOfRange, match=r"is 0; must be 1$"):
        check_lora(LoraConfig(rank=0), one_rank)


def test_another_base_model_is_refused_with_what_to_name_instead():
    with pytest.raises(errors.ModelNotFound, match="tiny is served: give that name, or none"):
        check_base_model("other", MODEL)


def test_a_datum_that_lacks_nothing_is_told_only_of_the_input_that_its_loss_does_not_have():
    datum = Datum.from_completion([1, 2], [3], logprobs=-1.0, advantages=1.0, rewards=1.0)
    with pytest.raises(errors.UnknownField, match=r"it accepts [^;]*$") as caught:
        check_batch([datum], ForwardBackwardSpec("ppo"), MODEL, 1)
    assert caught.value.field == "data[0].loss_inputs[rewards]"


def policy_datum(**inputs):
    """Make a datum whose first position has no advantage and whose second has one."""
    own = {"logprobs": [-1.0, -1.0], "advantages": [0.0, 1.0], **inputs}
    values = {name: np.array(row, np.float32) for name, row in own.items()}
    return Datum(np.array([1, 2], np.int32), {"target_tokens": np.array([2, 3]), **values})


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (ForwardBackwardSpec("grpo", {"kl_coef": 0.1}), "reference_logprobs"),
        (ForwardBackwardSpec("dro"), "logprobs"),
        (ForwardBackwardSpec("gspo"), "logprobs"),
    ],
)
def test_a_placeholder_is_refused_where_a_loss_reads_it_without_an_advantage(spec, name):
    good, bad = policy_datum(**{name: [-1.0, -1.0]}), policy_datum(**{name: [1e30, -1.0]})
    check_batch([good], spec, MODEL, 1)
    with pytest.raises(errors.PositiveLogprob, match=f"set mask to 0 .*{spec.loss_fn} reads it") as caught:
        check_batch([bad], spec, MODEL, 1)
    assert caught.value.field == f"data[0].loss_inputs[{name}]"
    bad.loss_fn_inputs["mask"] = np.array([0, 1], np.uint8)
    check_batch([bad], spec, MODEL, 1)


def test_a_placeholder_is_accepted_where_a_loss_does_not_read_it():
    check_batch([policy_datum(logprobs=[1e30, -1.0])], ForwardBackwardSpec("ppo"), MODEL, 1)
    unread = policy_datum(reference_logprobs=[1e30, -1.0])
    check_batch([unread], ForwardBackwardSpec("grpo"), MODEL, 1)
    chosen = policy_datum(logprobs=[1e30, -1.0])
    chosen.loss_fn_inputs["sequence_ratio_mask"] = np.array([0, 1], np.uint8)
    check_batch([chosen], ForwardBackwardSpec("gspo"), MODEL, 1)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-4, 1e30])
def test_a_temperature_by_which_logits_cannot_be_divided_is_refused_whatever_the_advantage(temperature):
    with pytest.raises(errors.OutOfRange) as caught:
        check_batch([policy_datum(temperature=[temperature, 1.0])], ForwardBackwardSpec("ppo"), MODEL, 1)
    assert caught.value.field == "data[0].loss_inputs[temperature]"


def test_the_range_of_dropout_excludes_its_upper_end():
    check_lora(LoraConfig(rank=8, alpha=16.0, dropout=0.99), MODEL)
    with pytest.raises(errors.OutOfRange, match=r"is 1; must be at least 0 and below 1$") as caught:
        check_lora(LoraConfig(rank=8, alpha=16.0, dropout=1.0), MODEL)
    assert caught.value.field == "lora.dropout"
