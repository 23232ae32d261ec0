"""A run with each optimizer: it resumes bit for bit, keeps its optimizer, and is unharmed by failures."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models.engine_cases import make_data, saved, train, weights
from support.models.optimizer_cases import PARAMS
from support.models.tiny_models import make_tiny_llama

from paceline.errors import CheckpointMismatch, NoGradient, OptimizerChanged, OutOfMemory
from paceline.types import AdamParams, LoraConfig
from trainer_service.engine.optimizers.apollo import Apollo
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def make_engine(model):
    def make():
        engine = PeftEngine(EngineOptions(str(model), "tiny"))
        engine.create_run("run", LoraConfig(rank=4, dropout=0.3, seed=3))
        return engine

    return make


def steps(engine, params, seeds):
    for seed in seeds:
        train(engine, data=make_data(seed=seed))
        output = engine.optim_step("run", params)
    return output


def edit_state(directory, change):
    path = directory / "trainer_state.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", PARAMS)
def test_two_and_two_steps_are_four_to_the_last_bit(make_engine, tmp_path, name):
    straight, first, second = make_engine(), make_engine(), make_engine()
    steps(straight, PARAMS[name], range(4))
    steps(first, PARAMS[name], range(2))
    saved(first, tmp_path / "half")
    steps(second, AdamParams(), [9])  # It must leave no trace.
    assert second.load_state("run", tmp_path / "half", with_optimizer=True).step == 2
    assert steps(second, PARAMS[name], range(2, 4)).step == 4
    assert saved(second, tmp_path / "second") == saved(straight, tmp_path / "straight")


@pytest.mark.parametrize("name", PARAMS)
def test_a_discarded_gradient_leaves_no_trace_before_the_first_step_or_after(make_engine, tmp_path, name):
    engine = make_engine()
    engine.create_run("plain", LoraConfig(rank=4))
    for step in range(2):
        before = saved(engine, tmp_path / f"before {step}", "plain")
        tokens = sum(train(engine, "plain", data=make_data(seed=seed)).metrics["tokens:sum"] for seed in (1, 2))
        assert saved(engine, tmp_path / f"waits {step}", "plain") != before
        assert [engine.discard_gradient("plain") for _ in range(2)] == [tokens, 0]
        assert saved(engine, tmp_path / f"after {step}", "plain") == before
        train(engine, "plain")
        assert engine.optim_step("plain", PARAMS[name]).step == step + 1


def test_a_gradient_is_discarded_that_a_step_would_refuse(make_engine):
    engine = make_engine()
    steps(engine, PARAMS["apollo"], [0])
    data = make_data((5,))
    data[0].loss_fn_inputs["weights"][-1] = np.inf
    train(engine, data=data)
    assert engine.discard_gradient("run") > 0
    with pytest.raises(NoGradient):
        engine.optim_step("run", PARAMS["adafactor"])
    assert steps(engine, PARAMS["apollo"], [1]).step == 2


@pytest.mark.parametrize("name", PARAMS)
def test_each_optimizer_learns_and_reports_its_rate_and_the_norm_before_clipping(make_engine, name):
    engine, params = make_engine(), replace(PARAMS[name], learning_rate=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(12):
        losses.append(train(engine, data=make_data(masked=False)).metrics["loss:sum"])
        output = engine.optim_step("run", params)
    assert losses[-1] < losses[0]
    assert output.grad_norm > params.grad_clip_norm
    assert output.learning_rate == 3e-3


def test_a_run_keeps_to_its_optimizer_until_weights_are_loaded_alone(make_engine, tmp_path):
    engine = make_engine()
    steps(engine, PARAMS["apollo"], range(2))
    saved(engine, tmp_path / "state")
    train(engine)
    before = weights(engine)
    with pytest.raises(OptimizerChanged) as caught:
        engine.optim_step("run", PARAMS["adafactor"])
    assert (caught.value.field, caught.value.metadata) == ("adafactor", {"optimizer": "apollo"})
    torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)
    assert engine.optim_step("run", PARAMS["apollo"]).step == 3, "the gradient stays"
    engine.load_state("run", tmp_path / "state", with_optimizer=False)
    assert steps(engine, PARAMS["adafactor"], [5]).step == 1


@pytest.mark.parametrize(
    ("name", "setting", "value"), [("apollo", "rank", 2), ("apollo", "seed", 8), ("apollo_mini", "seed", 8)]
)
def test_settings_that_the_state_depends_on_stay_the_same(make_engine, tmp_path, name, setting, value):
    engine, other = make_engine(), make_engine()
    steps(engine, PARAMS[name], [0])
    saved(engine, tmp_path / "state")
    other.load_state("run", tmp_path / "state", with_optimizer=True)
    for one in (engine, other):
        train(one)
        with pytest.raises(OptimizerChanged) as caught:
            one.optim_step("run", replace(PARAMS[name], **{setting: value}))
        assert caught.value.field == f"{name}.{setting}"
        assert one.optim_step("run", replace(PARAMS[name], learning_rate=0.5, update_interval=7)).step == 2


def test_the_checkpoint_names_the_optimizer_and_its_settings(make_engine, tmp_path):
    engine = make_engine()
    saved(engine, tmp_path / "fresh")
    steps(engine, PARAMS["apollo"], [0])
    steps(engine, replace(PARAMS["apollo"], learning_rate=0.25), [1])
    saved(engine, tmp_path / "stepped")
    fresh, stepped = (json.loads((tmp_path / name / "trainer_state.json").read_text()) for name in ("fresh", "stepped"))
    assert (fresh["format_version"], fresh["optimizer"]) == (1, None)
    assert stepped["optimizer"]["name"] == "apollo"
    assert stepped["optimizer"]["settings"] == asdict(replace(PARAMS["apollo"], learning_rate=0.25))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["optimizer"].update(name="sgd"),
        lambda content: content["optimizer"]["settings"].update(momentum=0.9),
        lambda content: content["optimizer"]["settings"].update(rank=0),
        lambda content: content["optimizer"]["settings"].update(rank=2),
        lambda content: content["optimizer"].update(name="adamw", settings={}),
    ],
)
def test_a_checkpoint_of_an_optimizer_that_does_not_fit_changes_nothing(make_engine, tmp_path, change):
    engine = make_engine()
    steps(engine, PARAMS["apollo"], range(2))
    saved(engine, tmp_path / "state")
    edit_state(tmp_path / "state", change)
    steps(engine, PARAMS["apollo"], [2])
    before = saved(engine, tmp_path / "before")
    with pytest.raises(CheckpointMismatch):
        engine.load_state("run", tmp_path / "state", with_optimizer=True)
    assert saved(engine, tmp_path / "after") == before


def test_8_bit_moments_are_saved_as_they_are(make_engine, tmp_path):
    engine = make_engine()
    steps(engine, PARAMS["adamw_8bit"], [0])
    saved(engine, tmp_path / "state")
    dtypes = {
        name.partition(".")[0]: tensor.dtype
        for name, tensor in load_file(tmp_path / "state" / "optimizer.safetensors").items()
    }
    assert dtypes == {
        "exp_avg": torch.uint8,
        "exp_avg_sq": torch.uint8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq_scale": torch.float32,
        "rng_state": torch.uint8,
    }


def test_a_step_that_runs_out_of_memory_leaves_the_run_as_it_was(make_engine, tmp_path, monkeypatch):
    engine = make_engine()
    steps(engine, PARAMS["apollo"], [0])
    train(engine)
    before = saved(engine, tmp_path / "before")
    with monkeypatch.context() as patch:
        patch.setattr(Apollo, "workspace", 1 << 48)  # The allocator refuses.
        with pytest.raises(OutOfMemory):
            engine.optim_step("run", PARAMS["apollo"])
    assert saved(engine, tmp_path / "after") == before
    assert engine.optim_step("run", PARAMS["apollo"]).step == 2
