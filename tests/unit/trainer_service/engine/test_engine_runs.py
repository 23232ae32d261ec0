"""Many runs on one base model: what they share, what they do not, and which adapters they may have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.models.engine_cases import ADAM, make_data, train, warmed, weights
from transformers import AutoModelForCausalLM

from paceline.errors import (
    InvalidArgument,
    ModelNotFound,
    OutOfRange,
    RunNotFound,
)
from paceline.types import AdamParams, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.model.base_model import load_base_model
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.runs.lora_run import initialise
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


def test_initial_weights_depend_on_the_seed_alone(make_engine):
    lora = LoraConfig(rank=4, seed=7)
    first = make_engine()
    first.create_run("only", lora)
    second = make_engine(dtype="bfloat16")
    second.create_run("earlier", LoraConfig(rank=8, seed=1))
    warmed(second, "earlier")
    second.create_run("later", lora)
    second.create_run("other", dataclasses.replace(lora, seed=8))
    torch.testing.assert_close(weights(second, "later"), weights(first, "only"), rtol=0, atol=0)
    assert any(not torch.equal(w, weights(first, "only")[name]) for name, w in weights(second, "other").items())


def test_initial_weights_of_a_seed_are_the_same_on_every_machine():
    parameters = {f"{part}.weight": torch.nn.Parameter(torch.ones(4, 64)) for part in ("q.lora_A", "q.lora_B")}
    initialise(parameters, 7)
    a, b = parameters.values()
    expected = [0.0087306, -0.0752992, 0.0398029, 0.0392226]
    np.testing.assert_allclose(a[0, :4].detach().numpy(), expected, atol=1e-7)
    assert not b.any()


def test_creating_a_run_and_training_leave_the_global_generator_alone(engine):
    state = torch.get_rng_state()
    engine.create_run("dropout", LoraConfig(rank=4, dropout=0.5))
    train(engine, "dropout")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fresh_adapter_changes_nothing_and_b_is_zero(engine, models):
    data = make_data((12,), masked=False)
    output = engine.forward_backward("run", data, ForwardBackwardSpec("cross_entropy", forward_only=True))
    stock = AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float32)
    logits = stock(input_ids=torch.from_numpy(data[0].model_input.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(data[0].loss_fn_inputs["target_tokens"])
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"], expected, rtol=1e-4, atol=1e-4)


def test_runs_do_not_touch_each_other(make_engine):
    configs = {
        "a": LoraConfig(rank=4, dropout=0.2),
        "b": LoraConfig(rank=8, alpha=8, train_mlp=False, layers=(1,)),
        "c": LoraConfig(rank=2, train_attn=False, train_unembed=True, use_rslora=True, dropout=0.5),
    }
    together = make_engine()
    for run_id, lora in configs.items():
        together.create_run(run_id, lora)
    for step in range(2):
        for run_id in configs:
            train(together, run_id, data=make_data(seed=step))
            train(together, run_id, data=make_data(seed=step + 10))
        for run_id in configs:
            together.optim_step(run_id, ADAM)
    for run_id, lora in configs.items():
        alone = make_engine()
        alone.create_run(run_id, lora)
        for step in range(2):
            train(alone, run_id, data=make_data(seed=step))
            train(alone, run_id, data=make_data(seed=step + 10))
            alone.optim_step(run_id, ADAM)
        torch.testing.assert_close(weights(together, run_id), weights(alone, run_id), rtol=0, atol=0)


def test_training_moves_only_the_adapter(engine):
    before = {name: p.clone() for name, p in engine.model.named_parameters() if "lora_" not in name}
    warmed(engine)
    after = {name: p for name, p in engine.model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in after.items())


def test_unembed_adapter_on_tied_embeddings_leaves_the_embedding_alone(make_engine):
    engine = make_engine("qwen2")
    assert engine.model.config.tie_word_embeddings
    engine.create_run("run", LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=True))
    embedding = engine.model.get_input_embeddings().weight.clone()
    losses = []
    for _ in range(3):
        losses.append(train(engine).metrics["loss:sum"])
        engine.optim_step("run", ADAM)
    assert torch.equal(engine.model.get_input_embeddings().weight, embedding)
    assert list(weights(engine)) == ["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"]
    assert losses[-1] < losses[0]


def test_targets_and_layers_choose_the_modules(make_engine):
    engine = make_engine()
    engine.create_run("run", LoraConfig(rank=2, train_mlp=False, layers=(1,)))
    modules = {name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in weights(engine)}
    assert modules == {f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"}


def test_trainable_parameters_are_counted(make_engine):
    engine = make_engine()
    # q 64->64, k 64->32, v 64->32, o 64->64: rank x (in + out) each, in 2 layers.
    assert engine.create_run("run", LoraConfig(rank=2, train_mlp=False)).trainable_parameters == 2 * 2 * (
        128 + 96 + 96 + 128
    )


@pytest.mark.parametrize(
    ("lora", "error", "field"),
    [
        (LoraConfig(rank=4, layers=(2,)), OutOfRange, "lora.layers"),
        (LoraConfig(rank=4, train_attn=False, train_mlp=False), InvalidArgument, "lora"),
    ],
)
def test_impossible_adapters_are_refused(engine, lora, error, field):
    with pytest.raises(error) as caught:
        engine.create_run("bad", lora)
    assert caught.value.field == field
    with pytest.raises(RunNotFound):
        engine.optim_step("bad", ADAM)


def test_default_alpha_is_twice_the_rank_and_rslora_scales_by_the_root(make_engine):
    engine = make_engine()
    scalings = {
        LoraConfig(rank=4): 2.0,
        LoraConfig(rank=4, alpha=6.0): 1.5,
        LoraConfig(rank=4, alpha=6.0, use_rslora=True): 3.0,
    }
    for i, (lora, scaling) in enumerate(scalings.items()):
        engine.create_run(f"run{i}", lora)
        assert engine.model.model.layers[0].self_attn.q_proj.scaling[f"run{i}"] == scaling


def test_dropout_acts_in_training_only(make_engine):
    engine = make_engine()
    engine.create_run("run", LoraConfig(rank=4, dropout=0.5))
    warmed(engine)
    evaluated = [
        engine.forward_backward("run", make_data(), ForwardBackwardSpec("cross_entropy", forward_only=True)).metrics[
            "loss:sum"
        ]
        for _ in range(2)
    ]
    trained = [train(engine).metrics["loss:sum"] for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    assert len({evaluated[0], *trained}) == 3


def test_deleted_runs_are_gone_and_their_name_is_free(engine):
    warmed(engine)
    engine.delete_run("run")
    engine.delete_run("run")
    with pytest.raises(RunNotFound):
        train(engine)
    assert not [name for name, _ in engine.model.named_parameters() if "lora_" in name]
    engine.create_run("run", LoraConfig(rank=2))
    assert warmed(engine).optim_step  # It trains again.
    with pytest.raises(InvalidArgument):
        engine.create_run("run", LoraConfig(rank=2))


def test_bfloat16_base_trains_float32_weights(make_engine):
    full, half = make_engine(), make_engine(dtype="bfloat16")
    for engine in (full, half):
        engine.create_run("run", LoraConfig(rank=4))
    assert half.model.dtype == torch.bfloat16
    assert half.describe().dtype == "bfloat16"
    for _ in range(3):
        outputs = [train(engine).metrics["loss:sum"] for engine in (full, half)]
        for engine in (full, half):
            engine.optim_step("run", AdamParams(learning_rate=1e-5))
    assert outputs[1] == pytest.approx(outputs[0], rel=0.02)
    assert all(weight.dtype == torch.float32 for weight in weights(half).values())
    fresh = make_engine()
    fresh.create_run("run", LoraConfig(rank=4))
    moved = [weight != weights(fresh)[name] for name, weight in weights(half).items() if "lora_A" in name]
    assert torch.cat([part.flatten() for part in moved]).float().mean() > 0.9, "small updates must not round away"


def test_loading_errors_are_typed(models):
    with pytest.raises(ModelNotFound):
        load_base_model(EngineOptions(str(models["llama"] / "absent"), "absent"))


@pytest.mark.parametrize("gone", ["first", "second", "third"])
def test_runs_train_on_as_before_when_another_is_deleted(make_engine, gone):
    engine, alone = make_engine(), make_engine()
    names = ("first", "second", "third")
    for seed, name in enumerate(names):
        engine.create_run(name, LoraConfig(rank=4, seed=seed))
        alone.create_run(name, LoraConfig(rank=4, seed=seed))
    engine.delete_run(gone)
    for name in names:
        if name != gone:
            train(engine, name)
            train(alone, name)
            torch.testing.assert_close(weights(engine, name), weights(alone, name), rtol=0, atol=0)
