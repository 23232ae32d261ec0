"""How the engine applies losses: reductions, several targets per position, sequences that stay together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models.engine_cases import gradients, make_data, train, warmed
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama

from paceline.types import Datum, ForwardBackwardSpec, LoraConfig, Reduction
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

LENGTHS = (5, 17, 9, 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(model):
    def make(**options):
        engine = PeftEngine(EngineOptions(str(model), "tiny", **options))
        engine.create_run("run", LoraConfig(rank=4))
        return warmed(engine)

    return make


@pytest.fixture
def engine(make_engine):
    return make_engine(pack_tokens=32)


def passed(engine, data, loss="cross_entropy", config=None, **reduction):
    """Return the output of one pass and its gradient."""
    engine.runs["run"].drop_gradient()
    output = engine.forward_backward("run", data, ForwardBackwardSpec(loss, config or {}, **reduction))
    return output, gradients(engine)


def assert_equal_gradients(mine, theirs, rtol=1e-4):
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=rtol, atol=rtol * gradient.abs().max().item())


def weighted_losses(data, outputs):
    """Return cross entropy at each counted position of each datum, in float64."""
    return [
        (-output["logprobs"].astype(np.float64) * datum.loss_fn_inputs["weights"])[datum.loss_fn_inputs["mask"] == 1]
        for datum, output in zip(data, outputs, strict=True)
    ]


def test_token_mean_divides_loss_and_gradient_by_the_counted_positions(engine):
    data = make_data(LENGTHS)
    whole, gradient = passed(engine, data)
    mean, mean_gradient = passed(engine, data, reduction=Reduction.TOKEN_MEAN)
    tokens = sum(datum.counted_positions for datum in data)
    expected = np.concatenate(weighted_losses(data, whole.loss_fn_outputs)).mean()
    assert mean.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert mean.metrics["tokens:sum"] == tokens
    assert_equal_gradients(mean_gradient, {name: values / tokens for name, values in gradient.items()})


def test_sequence_mean_weighs_every_datum_the_same_and_leaves_empty_ones_out(engine):
    data = make_data(LENGTHS)
    data[1].loss_fn_inputs["mask"][:] = 0
    mean, mean_gradient = passed(engine, data, reduction=Reduction.SEQUENCE_MEAN)
    counted = [data[index] for index in (0, 2, 3)]
    losses, sums = [], []
    for datum in counted:
        output, gradient = passed(engine, [datum])
        losses.append(weighted_losses([datum], output.loss_fn_outputs)[0].mean())
        sums.append({name: values / datum.counted_positions for name, values in gradient.items()})
    assert mean.metrics["loss:sum"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert_equal_gradients(mean_gradient, {name: sum(part[name] for part in sums) / 3 for name in sums[0]})


@pytest.mark.parametrize("reduction", [Reduction.TOKEN_MEAN, Reduction.SEQUENCE_MEAN])
def test_parts_of_a_batch_add_up_to_its_mean(engine, reduction):
    data = make_data(LENGTHS)
    whole, gradient = passed(engine, data, "ppo", reduction=reduction)
    engine.runs["run"].drop_gradient()
    losses = 0.0
    for part in (data[:1], data[1:]):
        output = engine.forward_backward(
            "run", part, ForwardBackwardSpec("ppo", reduction=reduction, reduction_count=reduction.count(data))
        )
        losses += output.metrics["loss:sum"]
    assert losses == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    assert_equal_gradients(gradients(engine), gradient)


def test_means_of_metrics_do_not_depend_on_the_reduction(engine):
    data = make_data(LENGTHS)
    first, second = (passed(engine, data, "ppo", reduction=kind)[0].metrics for kind in list(Reduction)[:2])
    assert {**second, "loss:sum": 0} == pytest.approx({**first, "loss:sum": 0})


def several_targets(targets, length=11, seed=4):
    rng = np.random.default_rng(seed)
    return Datum(
        rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
        {
            "target_tokens": rng.integers(0, VOCAB_SIZE, (length, targets)),
            "weights": rng.normal(0, 1, (length, targets)).astype(np.float32),
            "mask": (np.arange(length) % 3 > 0).astype(np.uint8),
        },
    )


def one_target(datum, column):
    inputs = {name: datum.loss_fn_inputs[name][:, column].copy() for name in ("target_tokens", "weights")}
    return Datum(datum.model_input, {**datum.loss_fn_inputs, **inputs})


def test_several_targets_are_those_of_as_many_datums_with_one(make_engine):
    engine = make_engine(pack_tokens=40, logprob_chunk=4)
    datum = several_targets(3)
    together, gradient = passed(engine, [datum, *make_data((6, 3)), several_targets(2, 7)])
    apart, expected = passed(
        engine,
        [*(one_target(datum, k) for k in range(3)), *make_data((6, 3))]
        + [one_target(several_targets(2, 7), k) for k in range(2)],
    )
    assert together.metrics["loss:sum"] == pytest.approx(apart.metrics["loss:sum"], rel=1e-5)
    assert_equal_gradients(gradient, expected)
    logprobs = together.loss_fn_outputs[0]["logprobs"]
    assert (logprobs.shape, logprobs.dtype) == ((11, 3), np.float32)
    for column in range(3):
        alone = apart.loss_fn_outputs[column]["logprobs"]
        np.testing.assert_allclose(logprobs[:, column], alone, rtol=1e-4, atol=1e-5)
    assert [output["logprobs"].shape for output in together.loss_fn_outputs[1:]] == [(6,), (3,), (7, 2)]


def test_several_targets_count_each_position_once(engine):
    datum = several_targets(3)
    total, _ = passed(engine, [datum])
    mean, _ = passed(engine, [datum], reduction=Reduction.TOKEN_MEAN)
    assert total.metrics["tokens:sum"] == datum.counted_positions
    assert mean.metrics["loss:sum"] * datum.counted_positions == pytest.approx(total.metrics["loss:sum"], rel=1e-5)


@pytest.mark.parametrize("budget", [1, 32, 1000])
def test_the_sequence_ratio_of_gspo_is_that_of_each_datum_however_they_are_packed(make_engine, budget):
    engine = make_engine(pack_tokens=budget)
    data = make_data(LENGTHS)
    for datum in data[1:]:
        datum.loss_fn_inputs["sequence_ratio_mask"] = (np.arange(len(datum.model_input)) % 2).astype(np.uint8)
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    output, _ = passed(engine, data, "gspo", wide)
    loss = 0.0
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        counted = datum.loss_fn_inputs["mask"] == 1
        chosen = counted & (datum.loss_fn_inputs.get("sequence_ratio_mask", counted) != 0)
        ratio = np.exp((result["logprobs"].astype(np.float64) - datum.loss_fn_inputs["logprobs"])[chosen].mean())
        loss -= ratio * datum.loss_fn_inputs["advantages"][counted].sum()
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert "sequence_ratio:mean" in output.metrics


def test_thresholds_of_a_position_hold_beside_the_settings_of_the_others(engine):
    data = make_data(LENGTHS)
    none, _ = passed(engine, data, "ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9})
    assert none.metrics["clip_fraction:mean"] == 0
    inputs = data[3].loss_fn_inputs
    inputs["advantages"][:] = 1
    inputs["clip_high_threshold"] = np.zeros(LENGTHS[3], np.float32)
    some, _ = passed(engine, data, "ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9})
    tokens = some.metrics["tokens:sum"]
    assert some.metrics["clip_fraction:mean"] * tokens == pytest.approx(data[3].counted_positions)


def test_the_sum_is_the_default(engine):
    data = make_data(LENGTHS)
    assert train(engine, data=data).metrics == passed(engine, data, reduction=Reduction.SUM)[0].metrics


def test_the_temperature_of_a_datum_divides_its_logits_alone(engine):
    plain = make_data(LENGTHS)
    warm = [Datum(datum.model_input, dict(datum.loss_fn_inputs)) for datum in plain]
    warm[1].loss_fn_inputs["temperature"] = np.full(LENGTHS[1], 0.5, np.float32)
    warm[2].loss_fn_inputs["temperature"] = np.ones(LENGTHS[2], np.float32)
    before, _ = passed(engine, plain)
    after, gradient = passed(engine, warm)
    for index, (one, other) in enumerate(zip(before.loss_fn_outputs, after.loss_fn_outputs, strict=True)):
        assert np.array_equal(one["logprobs"], other["logprobs"]) == (index != 1), index
    alone, alone_gradient = passed(engine, warm[1:2])
    np.testing.assert_allclose(alone.loss_fn_outputs[0]["logprobs"], after.loss_fn_outputs[1]["logprobs"], rtol=1e-5)
    _, other_gradient = passed(engine, [warm[0], *warm[2:]])
    assert_equal_gradients({name: alone_gradient[name] + other_gradient[name] for name in gradient}, gradient)
