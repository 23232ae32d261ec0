"""Checks of a batch: what is refused says what the loss needs."""

import pytest

from paceline import errors
from paceline.types import Datum, ForwardBackwardSpec, LoraConfig, ModelInfo
from trainer_service.validation import check_batch, check_lora

MODEL = ModelInfo("tiny", 64, 100, "float32", 8, 2)


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (ForwardBackwardSpec("ppo"), "logprobs and advantages"),
        (ForwardBackwardSpec("grpo", {"kl_coef": 0.1}), "logprobs and advantages and reference_logprobs"),
    ],
)
def test_a_datum_for_another_loss_is_told_what_it_lacks_beside_what_it_has_too_much(spec, missing):
    with pytest.raises(errors.UnknownField, match=f"; it needs {missing}, which the datum lacks$") as caught:
        check_batch([Datum.from_completion([1, 2], [3])], spec, MODEL, 1)
    assert caught.value.field == "data[0].loss_inputs[weights]"


def test_a_datum_that_lacks_nothing_is_told_only_of_the_input_that_its_loss_does_not_have():
    datum = Datum.from_completion([1, 2], [3], logprobs=-1.0, advantages=1.0, rewards=1.0)
    with pytest.raises(errors.UnknownField, match=r"it accepts [^;]*$") as caught:
        check_batch([datum], ForwardBackwardSpec("ppo"), MODEL, 1)
    assert caught.value.field == "data[0].loss_inputs[rewards]"


def test_the_range_of_dropout_excludes_its_upper_end():
    check_lora(LoraConfig(rank=8, alpha=16.0, dropout=0.99), MODEL)
    with pytest.raises(errors.OutOfRange, match=r"is 1; must be at least 0 and below 1$") as caught:
        check_lora(LoraConfig(rank=8, alpha=16.0, dropout=1.0), MODEL)
    assert caught.value.field == "lora.dropout"
