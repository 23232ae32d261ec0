"""The engine on tiny random models: losses, gradients and optimizer steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models.engine_cases import (
    ADAM,
    MAKERS,
    check_non_finite_gradient_is_refused,
    gradients,
    lora_gradients,
    make_data,
    train,
    warmed,
    weights,
)
from support.models.tiny_models import VOCAB_SIZE

from paceline.errors import (
    NoGradient,
    NonFiniteGradient,
    OutOfMemory,
)
from paceline.types import AdamParams, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.model.base_model import output_head
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions


@pytest.fixture
def make_engine(models):
    def make(model="llama", **options):
        return PeftEngine(EngineOptions(str(models[model]), "tiny", **options))

    return make


@pytest.fixture
def engine(make_engine):
    engine = make_engine()
    engine.create_run("run", LoraConfig(rank=4))
    return engine


def test_a_run_tells_the_modules_that_it_adapts(make_engine):
    engine = make_engine()
    info = engine.create_run("run", LoraConfig(rank=4, train_attn=False, layers=(1,)))
    assert info.modules == tuple(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))


def test_describe(engine):
    info = engine.describe()
    assert (info.name, info.vocab_size, info.num_layers, info.dtype) == ("tiny", VOCAB_SIZE, 2, "float32")
    assert (info.max_context_length, info.max_lora_rank) == (512, 64)


@pytest.mark.parametrize("model", MAKERS)
def test_loss_and_gradient_equal_stock_transformers_and_peft(make_engine, models, model):
    engine = make_engine(model, pack_tokens=32, logprob_chunk=4)
    engine.create_run("run", LoraConfig(rank=4))
    warmed(engine)
    data = make_data()
    output = train(engine, data=data)
    loss, expected = lora_gradients(models[model], weights(engine), data)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients(engine).items():
        wanted = expected[name].float()
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "dro"])
def test_results_do_not_depend_on_packing(make_engine, loss):
    results = []
    for budget, chunk in [(1, 3), (32, 7), (100, 1000)]:
        engine = make_engine(pack_tokens=budget, logprob_chunk=chunk)
        engine.create_run("run", LoraConfig(rank=4))
        warmed(engine)
        results.append((train(engine, loss=loss), gradients(engine)))
    (first, first_gradients), *others = results
    for output, grads in others:
        assert output.metrics == pytest.approx(first.metrics, rel=1e-4)
        for mine, theirs in zip(output.loss_fn_outputs, first.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(mine["logprobs"], theirs["logprobs"], rtol=1e-4, atol=1e-4)
        for name, gradient in grads.items():
            scale = first_gradients[name].abs().max().item()
            torch.testing.assert_close(gradient, first_gradients[name], rtol=1e-3, atol=1e-3 * scale)


def test_masked_positions_have_no_logprob_no_loss_and_no_logits(engine):
    data = make_data()
    rows = []
    head = output_head(engine.model).base_layer
    handle = head.register_forward_hook(lambda _module, args, _output: rows.append(len(args[0])))
    output = engine.forward_backward("run", data, ForwardBackwardSpec("cross_entropy", forward_only=True))
    handle.remove()
    counted = sum(int(datum.loss_fn_inputs["mask"].sum()) for datum in data)
    assert sum(rows) == counted == output.metrics["tokens:sum"]
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(result["logprobs"] != 0, datum.loss_fn_inputs["mask"] == 1)
        assert result["logprobs"].dtype == np.float32
    loss = -sum(
        (r["logprobs"] * d.loss_fn_inputs["weights"]).sum() for d, r in zip(data, output.loss_fn_outputs, strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)


def test_without_a_mask_tokens_of_zero_advantage_count_and_have_logprobs(engine):
    data = make_data((6, 4), masked=False)
    for datum in data:
        datum.loss_fn_inputs["advantages"][:] = 0
    output = train(engine, loss="dro", data=data)
    assert output.metrics["tokens:sum"] == 10
    assert all(np.isfinite(result["logprobs"]).all() for result in output.loss_fn_outputs)
    assert engine.optim_step("run", ADAM).grad_norm > 0, "the quadratic term pulls where the advantage is zero"


def test_a_batch_with_nothing_counted_gives_a_zero_gradient(engine):
    data = make_data((4, 3))
    for datum in data:
        datum.loss_fn_inputs["mask"][:] = 0
    output = train(engine, data=data, loss="ppo")
    assert {name for name, value in output.metrics.items() if value} == set()
    assert output.metrics.keys() == {"loss:sum", "tokens:sum", "nonfinite:sum", "nonfinite_gradient:sum"}
    assert engine.optim_step("run", ADAM).grad_norm == 0.0


def test_ratio_metrics_are_token_means(make_engine):
    engine = make_engine(pack_tokens=20)
    engine.create_run("run", LoraConfig(rank=4))
    data = make_data()
    output = engine.forward_backward("run", data, ForwardBackwardSpec("ppo", forward_only=True))
    ratios = [
        np.exp(r["logprobs"] - d.loss_fn_inputs["logprobs"])[d.loss_fn_inputs["mask"] == 1]
        for d, r in zip(data, output.loss_fn_outputs, strict=True)
    ]
    assert output.metrics["ratio:mean"] == pytest.approx(np.mean(np.concatenate(ratios)), rel=1e-4)
    means = {"ratio:mean", "kl:mean", "clip_fraction:mean"}
    assert set(output.metrics) == {"loss:sum", "tokens:sum", "advantage_tokens:sum", "nonfinite:sum", *means}


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "grpo"])
def test_placeholders_without_a_mask_are_in_no_mean_and_no_gradient(engine, loss):
    """Prompts have no mask, an advantage of 0, and whatever log-probability."""
    data, expected = make_data((6, 9), masked=False), []
    warmed(engine)
    for placeholder in (-1.0, 0.0, -1e30, 1e30):
        for datum in data:
            datum.loss_fn_inputs["advantages"][:4] = 0
            datum.loss_fn_inputs["logprobs"][:4] = placeholder
        output = train(engine, loss=loss, data=data)
        assert output.metrics["nonfinite_gradient:sum"] == 0
        assert output.metrics["advantage_tokens:sum"] == 7
        expected.append((output.metrics, gradients(engine)))
        engine.optim_step("run", AdamParams(learning_rate=0.0))
    for metrics, gradient in expected[1:]:
        assert metrics == expected[0][0]
        for name, values in expected[0][1].items():
            torch.testing.assert_close(gradient[name], values, rtol=0, atol=0)


def test_gradients_accumulate_until_the_step(engine):
    warmed(engine)
    data = make_data()
    train(engine, data=data)
    whole = gradients(engine)
    engine.optim_step("run", AdamParams(learning_rate=0.0))
    for datum in data:
        train(engine, data=[datum])
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-3, atol=1e-3 * whole[name].abs().max().item())


def test_forward_only_leaves_gradient_and_weights_alone(engine):
    train(engine)
    before = gradients(engine), weights(engine)
    engine.forward_backward("run", make_data(seed=3), ForwardBackwardSpec("cross_entropy", forward_only=True))
    torch.testing.assert_close((gradients(engine), weights(engine)), before, rtol=0, atol=0)


def test_step_reports_and_clears_the_gradient(engine):
    tokens = train(engine).metrics["tokens:sum"] + train(engine, data=make_data(seed=1)).metrics["tokens:sum"]
    norm = torch.cat([gradient.flatten() for gradient in gradients(engine).values()]).norm().item()
    result = engine.optim_step("run", ADAM)
    assert (result.step, result.tokens, result.learning_rate) == (1, tokens, 1e-2)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert result.milliseconds > 0
    with pytest.raises(NoGradient):
        engine.optim_step("run", ADAM)


def test_step_without_gradient_is_refused(engine):
    with pytest.raises(NoGradient):
        engine.optim_step("run", ADAM)


def test_adamw_honours_every_setting(engine):
    """Compares two steps with the algorithm of arXiv 1711.05101 in float64."""
    params = AdamParams(0.03, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5)
    expected = {name: weight.double() for name, weight in weights(engine).items()}
    m = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    v = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for step in (1, 2):
        train(engine, data=make_data(seed=step))
        grads = {name: gradient.double() for name, gradient in gradients(engine).items()}
        norm = torch.cat([gradient.flatten() for gradient in grads.values()]).norm()
        assert engine.optim_step("run", params).grad_norm == pytest.approx(norm.item(), rel=1e-5)
        for name, gradient in grads.items():
            clipped = gradient * 0.5 / norm
            m[name] = 0.8 * m[name] + 0.2 * clipped
            v[name] = 0.9 * v[name] + 0.1 * clipped**2
            update = (m[name] / (1 - 0.8**step)) / ((v[name] / (1 - 0.9**step)).sqrt() + 1e-3)
            expected[name] = expected[name] * (1 - 0.03 * 0.1) - 0.03 * update
    for name, weight in weights(engine).items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-4, atol=1e-6)


def test_a_gradient_whose_norm_is_too_large_is_named_as_that(engine):
    data = make_data((5,))
    data[0].loss_fn_inputs["weights"][-1] = 1e30
    assert train(engine, data=data).metrics["nonfinite_gradient:sum"] == 0
    with pytest.raises(NonFiniteGradient, match="or its norm is NaN or infinite"):
        engine.optim_step("run", ADAM)


def test_non_finite_gradient_is_dropped_without_a_step(engine):
    check_non_finite_gradient_is_refused(engine)
    with pytest.raises(NoGradient):
        engine.optim_step("run", ADAM)
    train(engine)
    assert engine.optim_step("run", ADAM).step == 1


def test_running_out_of_memory_leaves_no_partial_gradient(make_engine):
    engine = make_engine(pack_tokens=1)
    engine.create_run("run", LoraConfig(rank=4, dropout=0.3))
    train(engine)
    before, rng_state = gradients(engine), engine.runs["run"].rng_state.clone()
    calls = []

    def exhaust(*_):
        calls.append(None)
        if len(calls) == 3:
            torch.empty(1 << 60)  # The allocator refuses.

    handle = output_head(engine.model).base_layer.register_forward_hook(exhaust)
    with pytest.raises(OutOfMemory):
        train(engine)
    handle.remove()
    torch.testing.assert_close(gradients(engine), before, rtol=0, atol=0)
    assert torch.equal(engine.runs["run"].rng_state, rng_state)
    tokens = engine.optim_step("run", ADAM).tokens
    assert tokens == sum(int(datum.loss_fn_inputs["mask"].sum()) for datum in make_data())
