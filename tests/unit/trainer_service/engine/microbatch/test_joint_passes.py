"""Runs that train in the same passes end as they would alone, and a failing run harms no other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.engine_cases import MAKERS, gradients, make_data, warmed, weights
from transformers import Gemma2Config, Gemma2ForCausalLM

from paceline.errors import OutOfMemory
from paceline.types import AdamParams, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.model.base_model import backbone
from trainer_service.engine.model.lora_linear import AdaptedLinear, Span, clip
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

RUNS = {
    "plain": (LoraConfig(rank=4), "cross_entropy"),
    "wide": (LoraConfig(rank=16, alpha=8, seed=1), "ppo"),
    "dropped": (LoraConfig(rank=8, dropout=0.3, seed=2), "importance_sampling"),
    "attention": (LoraConfig(rank=2, train_mlp=False, seed=3), "gspo"),
    "one layer": (LoraConfig(rank=4, layers=(1,), use_rslora=True, seed=4), "cispo"),
    "head": (LoraConfig(rank=4, train_unembed=True, dropout=0.2, seed=5), "dro"),
    "head alone": (LoraConfig(rank=3, train_attn=False, train_mlp=False, train_unembed=True, seed=6), "cross_entropy"),
    "mlp": (LoraConfig(rank=5, train_attn=False, seed=7), "grpo"),
}
STEP = AdamParams(learning_rate=1e-3)


@pytest.fixture
def make_engine(models):
    def make(names=RUNS, model="llama", **options):
        engine = PeftEngine(
            EngineOptions(str(models[model]), "tiny", **{"logprob_chunk": 24, "joint_passes": True} | options)
        )
        for name in names:
            engine.create_run(name, RUNS[name][0])
        return engine

    return make


def batch_of(name, step):
    place = list(RUNS).index(name)
    lengths = [(40, 21), (9, 33, 17), (50,), (5, 5, 30, 26), (64, 32), (18, 40), (35,), (48, 12)][place]
    data = make_data(lengths, seed=100 * place + step)
    if RUNS[name][1] == "gspo":
        for datum in data:  # Keeps ratios near 1, as GSPO's thresholds need.
            datum.loss_fn_inputs["advantages"] *= 0.1
    return data


def begin(engine, name, step, *, alone=False):
    return engine.begin(name, batch_of(name, step), ForwardBackwardSpec(RUNS[name][1]), alone=alone)


def advance_all(engine, passes=None):
    """Advance until nothing is left; record the runs of each pass."""
    done = []
    seen = [] if passes is None else passes
    while engine.is_busy:
        done += engine.advance(seen.append)
    return done


def difference(one, other):
    """Return the norm of the difference of two runs' weights over the norm of the second's."""
    apart = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(one.values(), other.values(), strict=True)])
    return (apart.norm() / torch.cat([b.double().flatten() for b in other.values()]).norm()).item()


def train_together(engine, names, steps):
    for step in range(steps):
        for name in names:
            begin(engine, name, step)
        for job in advance_all(engine):
            job.output()
        for name in names:
            engine.optim_step(name, STEP)


def train_alone(make_engine, name, steps, **options):
    engine = make_engine([name], **options)
    train_together(engine, [name], steps)
    return weights(engine, name)


@pytest.mark.parametrize(("names", "pack_tokens", "steps"), [(["plain", "head"], 4096, 50), (list(RUNS), 70, 12)])
def test_weights_after_many_steps_are_those_of_training_alone(make_engine, names, pack_tokens, steps):
    together = make_engine(names, pack_tokens=pack_tokens)
    train_together(together, names, steps)
    for name in names:
        alone = train_alone(make_engine, name, steps, pack_tokens=pack_tokens)
        assert difference(weights(together, name), alone) <= 1e-5, name


@pytest.mark.parametrize("model", MAKERS)
def test_outputs_and_gradients_in_bfloat16_are_those_of_a_pass_alone_within_rounding(make_engine, model):
    together = make_engine(model=model, dtype="bfloat16")
    jobs = {name: begin(together, name, 0) for name in RUNS}
    assert set(advance_all(together)) == set(jobs.values())
    for name, job in jobs.items():
        alone = make_engine([name], model=model, dtype="bfloat16")
        expected = begin(alone, name, 0)
        advance_all(alone)
        for mine, theirs in zip(job.output().loss_fn_outputs, expected.output().loss_fn_outputs, strict=True):
            np.testing.assert_allclose(mine["logprobs"], theirs["logprobs"], atol=0.15)
        both = [torch.cat([g.flatten() for g in gradients(engine, name).values()]) for engine in (together, alone)]
        assert torch.cosine_similarity(*both, dim=0) > 0.999, name


def test_all_waiting_runs_are_in_one_pass_and_commands_that_come_later_join(make_engine):
    engine, passes = make_engine(), []
    for name in RUNS:
        begin(engine, name, 0)
    advance_all(engine, passes)
    assert [sorted(names) for names in passes] == [sorted(RUNS)]
    engine = make_engine(["plain", "wide"], pack_tokens=64)
    passes = []
    long = engine.begin("plain", make_data((30,) * 20), ForwardBackwardSpec("cross_entropy"))
    assert engine.advance(passes.append) == []
    short = engine.begin("wide", make_data((20,), seed=1), ForwardBackwardSpec("ppo"))
    assert engine.advance(passes.append) == [short]
    assert advance_all(engine, passes) == [long]
    assert [len(names) for names in passes] == [1, 2, *[1] * (len(passes) - 2)]


@pytest.mark.parametrize("order", list(itertools.permutations(["plain", "dropped", "head"])))
def test_the_order_of_arrival_changes_no_result(make_engine, order):
    results = []
    for names in (list(order), ["plain", "dropped", "head"]):
        engine = make_engine(names, pack_tokens=64)
        warm = [begin(engine, name, 0) for name in names]
        engine.advance(lambda _: None)
        assert set(advance_all(engine)) <= set(warm)
        results.append({name: gradients(engine, name) for name in order})
    for name in order:
        assert difference(results[0][name], results[1][name]) <= 1e-5


def test_forward_only_jobs_and_others_pass_apart_and_get_what_they_get_alone(make_engine):
    engine, passes = make_engine(["plain", "wide", "dropped"]), []
    options = {"plain": True, "wide": False, "dropped": True}
    jobs = {
        name: engine.begin(name, batch_of(name, 0), ForwardBackwardSpec(RUNS[name][1], forward_only=forward_only))
        for name, forward_only in options.items()
    }
    advance_all(engine, passes)
    assert sorted(sorted(names) for names in passes) == [["dropped", "plain"], ["wide"]]
    assert [engine.runs[name].has_gradient for name in options] == [False, True, False]
    for name, forward_only in options.items():
        alone = make_engine([name])
        expected = alone.forward_backward(
            name, batch_of(name, 0), ForwardBackwardSpec(RUNS[name][1], forward_only=forward_only)
        )
        assert jobs[name].output().metrics == pytest.approx(expected.metrics, rel=1e-6)


def test_several_targets_per_position_share_a_pass_with_one(make_engine):
    engine, passes = make_engine(["plain", "head", "wide"]), []
    several = make_data((30, 20), masked=False)
    for datum in several:
        for name in ("target_tokens", "weights"):
            datum.loss_fn_inputs[name] = np.stack([datum.loss_fn_inputs[name]] * 3, axis=1)
    jobs = [
        engine.begin(name, data, ForwardBackwardSpec("cross_entropy"))
        for name, data in [("plain", several), ("head", make_data()), ("wide", make_data())]
    ]
    advance_all(engine, passes)
    assert len(passes) == 1
    assert jobs[0].output().loss_fn_outputs[0]["logprobs"].shape == (30, 3)
    for job, name, data in zip(jobs, ("plain", "head", "wide"), (several, make_data(), make_data()), strict=True):
        alone = make_engine([name])
        expected = alone.forward_backward(name, data, ForwardBackwardSpec("cross_entropy"))
        assert job.output().metrics == pytest.approx(expected.metrics, rel=1e-6)


def fail_on(engine, name, calls):
    """Make the engine run out of memory whenever a run takes part in a pass; record the runs of each pass."""
    layer = next(module for module in engine.model.modules() if isinstance(module, AdaptedLinear))

    def exhaust(*_):
        calls.append([span.run_id for span in layer.routing.spans])
        if name in calls[-1]:
            torch.empty(1 << 60)  # The allocator refuses.

    backbone(engine.model).register_forward_hook(exhaust)


def test_a_run_that_fails_fails_by_itself_and_its_neighbours_are_unharmed(make_engine):
    names = ["plain", "dropped", "head"]
    engine = make_engine(names)
    for name in names:
        begin(engine, name, 0)
    advance_all(engine)
    before = gradients(engine, "dropped"), engine.runs["dropped"].rng_state.clone()
    calls = []
    fail_on(engine, "dropped", calls)
    jobs = {name: begin(engine, name, 1) for name in names}
    advance_all(engine)
    assert sorted(calls[0]) == sorted(names)
    assert {len(runs) for runs in calls[1:]} == {1}
    assert [calls.count([name]) for name in ("plain", "head")] == [1, 1]
    assert ["dropped"] in calls
    with pytest.raises(OutOfMemory):
        jobs["dropped"].output()
    torch.testing.assert_close(gradients(engine, "dropped"), before[0], rtol=0, atol=0)
    assert torch.equal(engine.runs["dropped"].rng_state, before[1])
    for name in ("plain", "head"):
        alone = make_engine([name])
        for step in range(2):
            begin(alone, name, step)
            advance_all(alone)
        assert difference(gradients(engine, name), gradients(alone, name)) <= 1e-5
        assert jobs[name].output().metrics["tokens:sum"] > 0


def test_a_gradient_that_is_not_finite_stays_in_its_own_run(make_engine):
    engine, alone = make_engine(["plain", "wide"]), make_engine(["wide"])
    data = batch_of("plain", 0)
    data[0].loss_fn_inputs["weights"][:] = np.nan
    engine.begin("plain", data, ForwardBackwardSpec("cross_entropy"))
    for each in (engine, alone):
        begin(each, "wide", 0)
        advance_all(each)
    assert not all(torch.isfinite(gradient).all() for gradient in gradients(engine, "plain").values())
    assert difference(gradients(engine, "wide"), gradients(alone, "wide")) <= 1e-5


def test_weights_that_are_not_finite_stay_in_their_own_run(make_engine):
    engine, alone = make_engine(["plain", "wide"]), make_engine(["wide"])
    for parameter in engine.runs["plain"].parameters.values():
        parameter.data.fill_(torch.inf)
    begin(engine, "plain", 0)
    for each in (engine, alone):
        begin(each, "wide", 0)
        advance_all(each)
    assert difference(gradients(engine, "wide"), gradients(alone, "wide")) <= 1e-5


@pytest.mark.parametrize("setting", ["off", "alone"])
def test_without_joint_passes_every_bit_is_that_of_training_alone(make_engine, setting):
    names, passes = list(RUNS), []
    engine = make_engine(names, pack_tokens=64, joint_passes=setting == "alone")
    for name in names:
        begin(engine, name, 0, alone=setting == "alone")
    advance_all(engine, passes)
    assert {len(runs) for runs in passes} == {1}
    for name in names:
        alone = make_engine([name], pack_tokens=64)
        begin(alone, name, 0)
        advance_all(alone)
        torch.testing.assert_close(gradients(engine, name), gradients(alone, name), rtol=0, atol=0)


def test_dropout_depends_on_neither_neighbours_nor_packing_nor_chunks(models):
    results = []
    for pack_tokens, chunk, neighbours in [(4096, 512, ()), (40, 5, ()), (4096, 7, ("plain", "wide"))]:
        engine = PeftEngine(
            EngineOptions(str(models["llama"]), "tiny", pack_tokens=pack_tokens, logprob_chunk=chunk, joint_passes=True)
        )
        for name in ("head", *neighbours):
            engine.create_run(name, RUNS[name][0])
        warmed(engine, "head")
        for name in ("head", *neighbours):
            begin(engine, name, 0)
        advance_all(engine)
        results.append(gradients(engine, "head"))
    for other in results[1:]:
        assert difference(other, results[0]) <= 1e-5


def test_dropout_differs_from_call_to_call(make_engine):
    engine, seen = make_engine(["dropped"]), []
    for _ in range(2):
        begin(engine, "dropped", 0)
        advance_all(engine)
        seen.append([gradient.norm().item() for gradient in gradients(engine, "dropped").values()])
        engine.runs["dropped"].drop_gradient()
    assert seen[0] != seen[1]


def test_a_mask_is_that_of_its_seed_layer_and_segments_however_the_rows_are_cut():
    like = torch.ones(20, 64)
    span = Span("run", 0, 20, ((0, 12), (3, 8)), seed=7)
    mask = span.mask(5, 0.25, like)
    assert mask.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert (mask == 0).float().mean() == pytest.approx(0.25, abs=0.05)
    assert torch.equal(span.mask(5, 0.25, like), mask), "a layer that is computed again gets the same"
    assert not torch.equal(span.mask(6, 0.25, like), mask)
    assert not torch.equal(replace(span, seed=8).mask(5, 0.25, like), mask)
    other = replace(span, segments=((0, 12), (4, 8))).mask(5, 0.25, like)
    assert torch.equal(other[:12], mask[:12])
    assert not torch.equal(other[12:], mask[12:])
    (part,) = clip([replace(span, start=30, stop=50)], 35, 45)
    assert torch.equal(part.mask(5, 0.25, like[:10]), mask[5:15])


def test_models_whose_layers_are_not_fused_train_jointly_too(tmp_path):
    config = Gemma2Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    names = ["plain", "wide", "dropped", "head", "attention"]
    together = PeftEngine(EngineOptions(str(tmp_path), "tiny", pack_tokens=128, joint_passes=True))
    for name in names:
        together.create_run(name, RUNS[name][0])
    train_together(together, names, 3)
    for name in names:
        alone = PeftEngine(EngineOptions(str(tmp_path), "tiny", pack_tokens=128))
        alone.create_run(name, RUNS[name][0])
        train_together(alone, [name], 3)
        assert difference(weights(together, name), weights(alone, name)) <= 1e-5
