"""Every loss against its closed form in float64, and known mistakes of implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.errors import NonFinite, OutOfRange, UnknownField, UnknownLoss
from trainer_service.engine.loss.losses import LOSSES, SEQUENCE_LENGTHS
from trainer_service.engine_link.loss_specs import LOSS_SPECS, resolve_loss

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "grpo")
CLIPPING_LOSSES = ("ppo", "cispo", "gspo", "grpo")
NARROW = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def thresholds(inputs, config):
    return (inputs.get(name, config[name]) for name in ("clip_low_threshold", "clip_high_threshold"))


def surrogate(ratio, inputs, config):
    """Return PPO's clipped surrogate loss and its derivative with respect to the log ratio, branch by branch."""
    advantage = inputs["advantages"]
    low, high = thresholds(inputs, config)
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    bound = np.where(advantage > 0, high, low)
    return np.where(clipped, -bound * advantage, -ratio * advantage), np.where(clipped, 0.0, -ratio * advantage)


def sequence_ratios(log_ratio, inputs):
    """Return, at each position, exp of the mean log ratio over the chosen positions of its sequence."""
    ratios, start = np.empty_like(log_ratio), 0
    chosen = inputs.get("sequence_ratio_mask", np.ones_like(log_ratio)) != 0
    for length in inputs[SEQUENCE_LENGTHS]:
        part = slice(start, start + length)
        ratios[part] = np.exp(log_ratio[part][chosen[part]].mean())
        start += length
    return ratios


def closed_form(name, lp, inputs, config):
    """Return the loss per token and its derivative with respect to lp, in float64."""
    if name == "cross_entropy":
        return -lp * inputs["weights"], -inputs["weights"]
    log_ratio, advantage = lp - inputs["logprobs"], inputs["advantages"]
    if name == "importance_sampling":
        return -np.exp(log_ratio) * advantage, -np.exp(log_ratio) * advantage
    if name in {"ppo", "gspo"}:
        ratio = np.exp(log_ratio) if name == "ppo" else sequence_ratios(log_ratio, inputs)
        return surrogate(ratio, inputs, config)
    if name == "cispo":
        weight = np.clip(np.exp(log_ratio), *thresholds(inputs, config))
        return -weight * lp * advantage, -weight * advantage
    if name == "dro":
        beta = config["beta"]
        return -(lp * advantage - 0.5 * beta * log_ratio**2), -(advantage - beta * log_ratio)
    loss, derivative = surrogate(np.exp(log_ratio), inputs, config)
    reference = inputs["reference_logprobs"] - lp
    k3 = np.exp(reference) - reference - 1
    return loss + config["kl_coef"] * k3, derivative + config["kl_coef"] * (1 - np.exp(reference))


def batch(size=400, seed=0):
    """Make ratios from about 0.2 to 5, advantages of both signs and exactly zero, and weights of both signs."""
    rng = np.random.default_rng(seed)
    q = -rng.uniform(0.5, 4.0, size)
    lp = np.minimum(q + rng.normal(0, 0.5, size), -1e-3)
    advantages = rng.normal(0, 1, size) * (rng.random(size) > 0.1)
    inputs = {
        "weights": rng.normal(0, 1, size),
        "logprobs": q,
        "advantages": advantages,
        "reference_logprobs": -rng.uniform(0.5, 4.0, size),
        SEQUENCE_LENGTHS: np.tile([1, 2, 5, 12], size // 20),
    }
    return lp, inputs


def own_thresholds(size, seed=1):
    """Make different thresholds for each position, around 1."""
    rng = np.random.default_rng(seed)
    return {
        "clip_low_threshold": rng.uniform(0.7, 0.99, size).astype(np.float32),
        "clip_high_threshold": rng.uniform(1.01, 1.3, size).astype(np.float32),
    }


def evaluate(name, lp, inputs, config=None):
    """Return (loss per token, derivative, means) as float64 arrays."""
    resolved = resolve_loss(name, config or {}).config
    learner = torch.tensor(lp, dtype=torch.float32, requires_grad=True)
    tensors = {key: torch.tensor(values, dtype=torch.float32) for key, values in inputs.items()}
    tensors[SEQUENCE_LENGTHS] = torch.tensor(inputs.get(SEQUENCE_LENGTHS, [len(lp)]))
    result = LOSSES[name](learner, tensors, resolved)
    (derivative,) = torch.autograd.grad(result.loss.sum(), learner)
    means = {key: values.double().numpy() for key, values in (result.means | result.advantage_means).items()}
    return result.loss.detach().double().numpy(), derivative.double().numpy(), means


def one(name, ratio, advantage, config=None):
    """Return loss and derivative of one token with this ratio and advantage."""
    lp, q = np.array([-1.0]), np.array([-1.0 - np.log(ratio)])
    loss, derivative, _ = evaluate(name, lp, {"logprobs": q, "advantages": np.array([advantage])}, config)
    return loss[0], derivative[0]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
        ("cispo", {}),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("dro", {}),
        ("dro", {"beta": 0.7}),
        ("grpo", {"kl_coef": 0.3}),
        ("grpo", {"kl_coef": 0.3, "clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("gspo", {}),
        ("gspo", NARROW),
    ],
)
def test_loss_and_gradient_equal_the_closed_form(name, config):
    lp, inputs = batch()
    loss, derivative, _ = evaluate(name, lp, inputs, config)
    expected_loss, expected_derivative = closed_form(name, lp, inputs, resolve_loss(name, config).config)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(derivative, expected_derivative, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CLIPPING_LOSSES)
@pytest.mark.parametrize("given", [("clip_low_threshold",), ("clip_high_threshold",), tuple(NARROW)])
def test_thresholds_by_position_take_the_place_of_the_settings(name, given):
    lp, inputs = batch()
    inputs |= {key: values for key, values in own_thresholds(len(lp)).items() if key in given}
    config = {**NARROW, "kl_coef": 0.2} if name == "grpo" else NARROW
    loss, derivative, _ = evaluate(name, lp, inputs, config)
    expected_loss, expected_derivative = closed_form(name, lp, inputs, resolve_loss(name, config).config)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(derivative, expected_derivative, rtol=1e-5, atol=1e-6)
    assert not np.allclose(loss, evaluate(name, *batch(), config)[0]), "the settings alone would do"


def test_the_sequence_mask_of_gspo_chooses_the_positions_of_the_mean_and_no_others():
    lp, inputs = batch()
    rng = np.random.default_rng(5)
    inputs["sequence_ratio_mask"] = (rng.random(len(lp)) < 0.5).astype(np.float32)
    lengths = inputs[SEQUENCE_LENGTHS]
    inputs["sequence_ratio_mask"][np.cumsum(lengths) - lengths] = 1
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    loss, derivative, means = evaluate("gspo", lp, inputs, wide)
    expected = sequence_ratios(lp - inputs["logprobs"], inputs)
    np.testing.assert_allclose(means["sequence_ratio"], expected, rtol=1e-5)
    np.testing.assert_allclose(loss, -expected * inputs["advantages"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(derivative, -expected * inputs["advantages"], rtol=1e-5, atol=1e-6)


def test_gspo_clips_a_sequence_as_a_whole_however_its_tokens_differ():
    lp, ratios = np.full(4, -3.0), np.array([3.0, 1 / 3.0, 1.2, 1.2])
    inputs = {"logprobs": lp - np.log(ratios), "advantages": np.ones(4), SEQUENCE_LENGTHS: np.array([2, 2])}
    loss, derivative, means = evaluate("gspo", lp, inputs, NARROW)
    np.testing.assert_allclose(loss, [-1.0, -1.0, -1.1, -1.1], rtol=1e-6)
    np.testing.assert_allclose(derivative, [-1.0, -1.0, 0.0, 0.0], atol=1e-6)
    np.testing.assert_array_equal(means["clip_fraction"], [0, 0, 1, 1])


def test_gspo_clips_all_of_a_sequence_or_nothing_at_a_threshold():
    lp = np.linspace(-12.0, -0.01, 400)
    for shift in (np.log(1.0004), np.log(1.0004) + 2e-7):
        inputs = {"logprobs": lp - shift, "advantages": np.ones(400)}
        assert evaluate("gspo", lp, inputs)[2]["clip_fraction"].mean() in {0.0, 1.0}


def test_gspo_keeps_the_precision_that_its_narrow_thresholds_need():
    """A long sequence with ratio exp(2e-4) is inside the thresholds, one with exp(5e-4) outside."""
    for shift, clipped in [(2e-4, 0.0), (5e-4, 1.0)]:
        lp = np.full(8000, -1.5)
        inputs = {"logprobs": lp - shift, "advantages": np.ones(8000)}
        assert evaluate("gspo", lp, inputs)[2]["clip_fraction"].mean() == clipped


def test_cross_entropy_of_several_targets_is_the_sum_over_them():
    rng = np.random.default_rng(3)
    lp, weights = -rng.uniform(0.1, 5, (50, 4)), rng.normal(0, 1, (50, 4))
    loss, derivative, means = evaluate("cross_entropy", lp, {"weights": weights})
    np.testing.assert_allclose(loss, -(lp * weights).sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(derivative, -weights, rtol=1e-6)
    assert not means


def test_grpo_without_kl_is_ppo_and_reads_no_reference():
    lp, inputs = batch()
    del inputs["reference_logprobs"]
    np.testing.assert_array_equal(evaluate("grpo", lp, inputs)[0], evaluate("ppo", lp, inputs)[0])


def test_defaults_are_the_documented_ones():
    assert resolve_loss("ppo", {}).config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert resolve_loss("cispo", {}).config == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert resolve_loss("dro", {}).config == {"beta": 0.05}
    assert resolve_loss("gspo", {}).config == {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
    assert resolve_loss("grpo", {}).config == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.2,
        "kl_coef": 0.0,
    }


def test_clip_thresholds_are_ratios_and_not_distances_from_one():
    assert one("ppo", 1.5, 1.0, {"clip_high_threshold": 1.2})[0] == pytest.approx(-1.2)
    assert one("ppo", 1.19, 1.0, {"clip_high_threshold": 1.2})[0] == pytest.approx(-1.19)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_clip_with_negative_advantage_lets_likely_tokens_be_pushed_down(name):
    loss, derivative = one(name, 3.0, -1.0)
    assert loss == pytest.approx(3.0)
    assert derivative == pytest.approx(3.0), "minimising the loss must lower lp"


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_clip_with_negative_advantage_stops_pushing_unlikely_tokens(name):
    loss, derivative = one(name, 0.1, -1.0)
    assert loss == pytest.approx(0.8)
    assert derivative == 0.0


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_clip_with_positive_advantage(name):
    assert one(name, 3.0, 1.0)[1] == 0.0
    assert one(name, 0.1, 1.0)[1] == pytest.approx(-0.1), "an unlikely good token is still pushed up"


@pytest.mark.parametrize("name", ["ppo", "gspo", "grpo"])
def test_a_clipped_ratio_that_overflows_has_the_loss_of_the_bound_and_no_gradient(name):
    lp, inputs = np.array([-1.0]), {"logprobs": np.array([-90.0]), "advantages": np.array([2.0])}
    bound = resolve_loss(name, {}).config["clip_high_threshold"]
    loss, derivative, _ = evaluate(name, lp, inputs)
    assert (loss[0], derivative[0]) == (pytest.approx(-2 * bound), 0.0)


@pytest.mark.parametrize("placeholder", [0.0, -1000.0, 1e30, -1e30, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "grpo"])
def test_a_placeholder_where_the_advantage_is_zero_changes_no_loss_no_gradient_and_no_mean(name, placeholder):
    lp, inputs = batch()
    unused = inputs["advantages"] == 0
    expected = evaluate(name, lp, inputs)
    inputs["logprobs"] = np.where(unused, placeholder, inputs["logprobs"])
    loss, derivative, means = evaluate(name, lp, inputs)
    np.testing.assert_array_equal(loss, expected[0])
    np.testing.assert_array_equal(derivative, expected[1])
    np.testing.assert_equal(means, expected[2])
    assert unused.any()
    assert all(np.isfinite(values).all() for values in means.values())


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "grpo"])
def test_a_token_that_the_learner_cannot_give_is_harmless_where_it_has_no_weight(name):
    lp, inputs = np.array([-1.0, -np.inf]), {"logprobs": np.array([-1.0, 0.0]), "advantages": np.array([1.0, 0.0])}
    loss, derivative, means = evaluate(name, lp, {**inputs, "weights": inputs["advantages"]})
    assert (loss[1], derivative[1]) == (0.0, 0.0)
    assert all(np.isfinite(values).all() for values in means.values())


@pytest.mark.parametrize("placeholder", [-1e30, 1e30, -np.inf, np.nan])
def test_the_ratio_of_a_sequence_reads_only_the_positions_that_its_mask_chooses(placeholder):
    lp, inputs = batch()
    unused = inputs["advantages"] == 0
    lengths = inputs[SEQUENCE_LENGTHS]
    unused[np.cumsum(lengths) - lengths] = False
    inputs["sequence_ratio_mask"] = (~unused).astype(np.float32)
    expected = evaluate("gspo", lp, inputs)
    inputs["logprobs"] = np.where(unused, placeholder, inputs["logprobs"])
    found = evaluate("gspo", lp, inputs)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_equal(mine, theirs)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo", "grpo"])
def test_a_ratio_that_overflows_and_counts_is_not_hidden(name):
    lp, inputs = np.array([-1.0]), {"logprobs": np.array([-1000.0]), "advantages": -np.ones(1)}
    assert evaluate(name, lp, inputs)[0][0] == np.inf


def test_cispo_keeps_the_gradient_that_ppo_takes_away():
    thresholds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert one("ppo", 3.0, 1.0, thresholds)[1] == 0.0
    assert one("cispo", 3.0, 1.0, thresholds)[1] == pytest.approx(-1.2)
    assert one("cispo", 0.1, -1.0, thresholds)[1] == pytest.approx(0.8)


def test_cispo_differentiates_lp_and_not_the_ratio():
    loss, derivative = one("cispo", 2.0, 1.5)
    assert loss == pytest.approx(-2.0 * -1.0 * 1.5)
    assert derivative == pytest.approx(-2.0 * 1.5)


def test_zero_advantage_still_has_dro_and_kl_gradients():
    lp, q = np.array([-1.0]), np.array([-2.0])
    inputs = {"logprobs": q, "advantages": np.zeros(1), "reference_logprobs": q}
    assert evaluate("dro", lp, inputs, {"beta": 0.5})[1][0] == pytest.approx(0.5)
    assert evaluate("grpo", lp, inputs, {"kl_coef": 0.5})[1][0] == pytest.approx(0.5 * (1 - np.exp(-1.0)))


def test_negative_cross_entropy_weight_pushes_the_token_down():
    lp = np.array([-1.0, -2.0])
    loss, derivative, _ = evaluate("cross_entropy", lp, {"weights": np.array([-0.5, 2.0])})
    np.testing.assert_allclose(loss, [-0.5, 4.0])
    np.testing.assert_allclose(derivative, [0.5, -2.0])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_means_of_ratio_and_k3(name):
    lp, inputs = batch()
    _, _, means = evaluate(name, lp, inputs)
    log_ratio, chosen = lp - inputs["logprobs"], inputs["advantages"] != 0
    np.testing.assert_allclose(means["ratio"], np.where(chosen, np.exp(log_ratio), 0), rtol=1e-5)
    k3 = np.where(chosen, np.exp(log_ratio) - 1 - log_ratio, 0)
    np.testing.assert_allclose(means["kl"], k3, rtol=1e-4, atol=1e-6)
    assert (means["kl"] >= -1e-7).all()


def test_clip_fraction_counts_tokens_without_gradient_in_ppo_and_outside_the_thresholds_in_cispo():
    ratios, advantages = np.array([3.0, 3.0, 0.1, 0.1, 1.0]), np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    lp = np.full(5, -1.0)
    inputs = {"logprobs": lp - np.log(ratios), "advantages": advantages}
    np.testing.assert_array_equal(evaluate("ppo", lp, inputs)[2]["clip_fraction"], [1, 0, 0, 1, 0])
    cispo = evaluate("cispo", lp, inputs, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    np.testing.assert_array_equal(cispo[2]["clip_fraction"], [1, 1, 1, 1, 0])


def test_grpo_reports_the_reference_kl_and_dro_the_squared_log_ratio():
    lp, inputs = batch()
    reference = inputs["reference_logprobs"] - lp
    kl = evaluate("grpo", lp, inputs, {"kl_coef": 0.1})[2]["reference_kl"]
    np.testing.assert_allclose(kl, np.exp(reference) - reference - 1, rtol=1e-4, atol=1e-6)
    squared = evaluate("dro", lp, inputs)[2]["squared_log_ratio"]
    np.testing.assert_allclose(squared, (lp - inputs["logprobs"]) ** 2, rtol=1e-4, atol=1e-6)


def test_every_spec_has_a_function_and_the_other_way_round():
    assert LOSSES.keys() == LOSS_SPECS.keys()


def test_reference_logprobs_are_required_only_with_a_kl_coefficient():
    assert "reference_logprobs" in LOSS_SPECS["grpo"].optional
    assert "reference_logprobs" not in resolve_loss("grpo", {}).required
    assert "reference_logprobs" in resolve_loss("grpo", {"kl_coef": 0.1}).required


def test_unknown_loss_and_bad_settings_are_named():
    with pytest.raises(UnknownLoss) as unknown:
        resolve_loss("reinforce", {})
    assert unknown.value.field == "loss_fn"
    for config, error in [
        ({"epsilon": 0.2}, UnknownField),
        ({"clip_low_threshold": float("nan")}, NonFinite),
        ({"clip_low_threshold": -0.1}, OutOfRange),
        ({"clip_low_threshold": 1.3}, OutOfRange),
        ({"clip_high_threshold": 1e300}, OutOfRange),
    ]:
        with pytest.raises(error) as caught:
            resolve_loss("ppo", config)
        assert caught.value.field == f"loss_fn_config[{next(iter(config))}]"
