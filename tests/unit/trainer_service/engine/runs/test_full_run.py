"""Runs that train every parameter: gradients, storage of weights, resuming, and files for other tools."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models.engine_cases import (
    ADAM,
    MAKERS,
    check_non_finite_gradient_is_refused,
    gradients,
    make_data,
    saved,
    train,
    weights,
)
from support.models.optimizer_cases import PARAMS
from support.models.tiny_models import make_tiny_llama
from tiny_architectures import make_architecture
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.errors import CheckpointMismatch, OutOfMemory
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, FullParameters, LoraConfig, WeightStorage
from trainer_service.engine.optimizers.adamw import AdamW, AdamWCpu
from trainer_service.engine.optimizers.rounded import RoundedOptimizer, round_stochastically
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

KEPT = {
    "float32": ("float32", WeightStorage.FLOAT32),
    "masters": ("bfloat16", WeightStorage.FLOAT32),
    "rounded": ("bfloat16", WeightStorage.BFLOAT16),
}
"""dtype of the engine, and how weights are stored."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        (name, tied): make(tmp_path_factory.mktemp(name), tied=tied)
        for name, make in MAKERS.items()
        for tied in (False, True)
    }


@pytest.fixture
def make_engine(models):
    def make(kept="float32", model=("llama", True), seed=3, **options):
        dtype, storage = KEPT[kept]
        engine = PeftEngine(EngineOptions(str(models[model]), "tiny", dtype=dtype, **options))
        engine.create_run("run", FullParameters(storage, seed))
        return engine

    return make


def steps(engine, params, seeds):
    for seed in seeds:
        train(engine, data=make_data(seed=seed))
        engine.optim_step("run", params)


@pytest.mark.parametrize("kept", KEPT)
def test_a_discarded_gradient_leaves_no_trace(make_engine, tmp_path, kept):
    engine = make_engine(kept)
    steps(engine, ADAM, [0])
    before = saved(engine, tmp_path / "before")
    tokens = train(engine, data=make_data(seed=1)).metrics["tokens:sum"]
    assert engine.discard_gradient("run") == tokens
    assert saved(engine, tmp_path / "after") == before


def stock_gradients(directory, data):
    """Return cross entropy and every parameter's gradient by plain transformers in float64, one datum at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        tokens = torch.from_numpy(datum.model_input.astype(np.int64))
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        lp = model(input_ids=tokens[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        total = total - (lp * torch.from_numpy(datum.loss_fn_inputs["weights"] * datum.loss_fn_inputs["mask"])).sum()
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", MAKERS)
def test_every_gradient_is_that_of_plain_transformers(make_engine, models, model, tied):
    engine = make_engine(model=(model, tied), pack_tokens=32, logprob_chunk=4)
    data = make_data()
    output = train(engine, data=data)
    loss, expected = stock_gradients(models[model, tied], data)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    own = gradients(engine)
    assert own.keys() == expected.keys()
    for name, gradient in own.items():
        wanted = expected[name].float()
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("kept", ["masters", "rounded"])
def test_gradients_of_bfloat16_passes_are_float32_and_point_where_float32_ones_do(make_engine, kept):
    exact, engine = make_engine(), make_engine(kept)
    for one in (exact, engine):
        train(one)
        train(one, data=make_data(seed=1))
    one, other = (torch.cat([g.double().flatten() for g in gradients(e).values()]) for e in (exact, engine))
    assert {gradient.dtype for gradient in gradients(engine).values()} == {torch.float32}
    assert functional.cosine_similarity(one, other, dim=0) > 0.99


def test_all_parameters_are_counted_tied_ones_once_and_stay_tied(make_engine, models):
    engine = make_engine(model=("qwen2", True))
    stock = AutoModelForCausalLM.from_pretrained(models["qwen2", True])
    before = weights(engine)
    steps(engine, ADAM, range(2))
    model = engine.runs["run"].model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(weight.numel() for weight in before.values()) == stock.num_parameters()
    assert not [name for name, weight in weights(engine).items() if torch.equal(weight, before[name])]
    info = engine.create_run("other", FullParameters())
    assert info.trainable_parameters == stock.num_parameters()


def test_full_and_adapter_runs_do_not_touch_each_other(models):
    configs = {"full": FullParameters(), "lora": LoraConfig(rank=4, dropout=0.2)}
    engines = {name: PeftEngine(EngineOptions(str(models["llama", True]), "tiny")) for name in ("together", *configs)}
    for name, parameters in configs.items():
        engines["together"].create_run(name, parameters)
        engines[name].create_run(name, parameters)
    for seed in range(2):
        for name in configs:
            for engine in (engines["together"], engines[name]):
                train(engine, name, data=make_data(seed=seed))
        for name in configs:
            for engine in (engines["together"], engines[name]):
                engine.optim_step(name, ADAM)
    for name in configs:
        torch.testing.assert_close(weights(engines["together"], name), weights(engines[name], name), rtol=0, atol=0)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", PARAMS)
def test_two_and_two_steps_are_four_to_the_last_bit(make_engine, tmp_path, name, kept):
    straight, first, second = make_engine(kept), make_engine(kept), make_engine(kept)
    steps(straight, PARAMS[name], range(4))
    steps(first, PARAMS[name], range(2))
    train(first, data=make_data(seed=2))  # Its gradient is pending in the checkpoint.
    saved(first, tmp_path / "half")
    steps(second, AdamParams(), [9])
    assert second.load_state("run", tmp_path / "half", with_optimizer=True).step == 2
    second.optim_step("run", PARAMS[name])
    steps(second, PARAMS[name], [3])
    assert saved(second, tmp_path / "second") == saved(straight, tmp_path / "straight")


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", PARAMS)
def test_every_optimizer_learns(make_engine, name, kept):
    engine, losses = make_engine(kept, seed=0), []
    params = type(PARAMS[name])(learning_rate=1e-3)
    for _ in range(6):
        losses.append(train(engine, data=make_data(masked=False)).metrics["loss:sum"])
        engine.optim_step("run", params)
    assert losses[-1] < losses[0]


def test_masters_step_as_float32_weights_do_and_are_computed_with_rounded(make_engine):
    engine = make_engine("masters")
    run = engine.runs["run"]
    own = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in run.weights.items()}
    optimizer = AdamW(own, ADAM)
    for step in (1, 2):
        train(engine, data=make_data(seed=step))
        for name, weight in own.items():
            weight.grad = run.parameters[name].grad.clone()
        optimizer.step(ADAM, step, 1.0)
        engine.optim_step("run", ADAM)
    for name, weight in own.items():
        assert torch.equal(run.weights[name], weight)
        assert torch.equal(run.parameters[name], weight.bfloat16())


def test_rounding_is_unbiased_and_leaves_what_bfloat16_holds():
    generator = torch.Generator().manual_seed(0)
    # A third of the way from one bfloat16 to the next, at several sizes and both signs.
    low = torch.tensor([1.0, -1.0, 3e-5, -128.0, 1e30]).bfloat16().float()
    gap = (low.view(torch.int32) + (1 << 16)).view(torch.float32) - low
    exact = low + gap / 3
    draws = torch.empty(200_000, len(low), dtype=torch.bfloat16)
    round_stochastically(exact.repeat(len(draws), 1), draws, generator)
    share = ((draws.float() - low) / gap).mean(0)
    assert set(((draws.float() - low) / gap).unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(share, torch.full_like(share, 1 / 3), rtol=0, atol=0.006)  # 5 standard deviations
    representable = torch.randn(1000).bfloat16()
    target = torch.empty_like(representable)
    round_stochastically(representable.float(), target, generator)
    assert torch.equal(representable, target)


def test_updates_too_small_for_bfloat16_have_their_effect_on_average():
    """Rounding to the nearest value would lose most of them."""
    torch.manual_seed(0)
    params, count = AdamParams(learning_rate=1e-5), 100_000
    start = (torch.randn(count) * 0.05).bfloat16()
    rounded, nearest = torch.nn.Parameter(start.clone()), start.clone()
    rounded.grad_dtype = torch.float32
    optimizer = RoundedOptimizer({"weight": rounded}, params, torch.Generator().manual_seed(0))
    for step in range(1, 11):
        rounded.grad = torch.ones(count)  # AdamW moves by the learning rate, whatever the gradient's size.
        optimizer.step(params, step, 1.0)
        nearest = (nearest.float() - 1e-5).bfloat16()
    moved, lost = (start.float() - weight.detach().float() for weight in (rounded, nearest))
    assert moved.mean().item() == pytest.approx(1e-4, rel=0.05)
    assert (lost == 0).float().mean() > 0.5
    assert (moved == 0).float().mean() < 0.9


def test_rounding_draws_from_the_run_alone(make_engine):
    engines = [make_engine("rounded", seed=seed) for seed in (1, 1, 2)]
    for engine in engines:
        torch.manual_seed(id(engine) % 1000)
        state = torch.get_rng_state()
        steps(engine, AdamParams(), range(2))
        assert torch.equal(torch.get_rng_state(), state)
    one, same, other = (torch.cat([weight.flatten() for weight in weights(engine).values()]) for engine in engines)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("kept", KEPT)
def test_a_step_that_runs_out_of_memory_leaves_the_run_as_it_was(make_engine, tmp_path, monkeypatch, kept):
    engine = make_engine(kept)
    steps(engine, ADAM, [0])
    train(engine)
    before = saved(engine, tmp_path / "before")
    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "workspace", 1 << 40)  # The allocator refuses.
        with pytest.raises(OutOfMemory):
            engine.optim_step("run", ADAM)
    assert saved(engine, tmp_path / "after") == before
    assert engine.optim_step("run", ADAM).step == 2


def test_a_step_on_bfloat16_weights_first_gets_the_memory_that_its_optimizer_needs(make_engine, tmp_path, monkeypatch):
    engine, params = make_engine("rounded"), PARAMS["adamw_cpu"]
    steps(engine, params, [0])
    train(engine)
    before = saved(engine, tmp_path / "before")

    def reserve(_optimizer):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(AdamWCpu, "reserve", reserve)
        with pytest.raises(OutOfMemory):
            engine.optim_step("run", params)
    assert saved(engine, tmp_path / "after") == before
    assert engine.optim_step("run", params).step == 2


@pytest.mark.parametrize("kept", KEPT)
def test_a_load_that_runs_out_of_memory_leaves_the_run_as_it_was(make_engine, tmp_path, monkeypatch, kept):
    engine, other = make_engine(kept), make_engine(kept)
    steps(other, ADAM, [1])
    train(other)
    saved(other, tmp_path / "state")
    steps(engine, ADAM, [0])
    train(engine)
    before = saved(engine, tmp_path / "before")
    last, place = list(gradients(other).values())[-1], torch.Tensor.to

    def to(tensor, *arguments, **options):
        if tensor.shape == last.shape and torch.equal(tensor, last):
            raise torch.OutOfMemoryError
        return place(tensor, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        with pytest.raises(OutOfMemory):
            engine.load_state("run", tmp_path / "state", with_optimizer=True)
    assert saved(engine, tmp_path / "after") == before


@pytest.mark.parametrize("kept", KEPT)
def test_a_gradient_that_is_not_finite_changes_no_weight(make_engine, kept):
    engine = make_engine(kept)
    check_non_finite_gradient_is_refused(engine)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", MAKERS)
@pytest.mark.parametrize("kept", KEPT)
def test_a_sampler_checkpoint_is_a_model_that_transformers_loads_as_it_is(make_engine, tmp_path, kept, model, tied):
    engine = make_engine(kept, model=(model, tied))
    steps(engine, ADAM, range(2))
    engine.save_adapter("run", tmp_path)
    dtype = getattr(torch, KEPT[kept][0])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert (stock.dtype, stock.config.tie_word_embeddings) == (dtype, tied)
    computed = {name: parameter.detach() for name, parameter in engine.runs["run"].parameters.items()}
    torch.testing.assert_close(dict(stock.named_parameters()), computed, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    again = make_engine(kept, model=(model, tied))
    assert again.load_state("run", tmp_path, with_optimizer=False).step == 0
    torch.testing.assert_close(weights(again), weights(engine), rtol=0, atol=0)


def test_a_checkpoint_of_another_kind_changes_nothing(make_engine, models, tmp_path):
    engine, other = make_engine(), make_engine("rounded")
    lora = PeftEngine(EngineOptions(str(models["llama", True]), "tiny"))
    lora.create_run("run", LoraConfig(rank=4))
    for name, one in {"full": engine, "rounded": other, "lora": lora}.items():
        steps(one, ADAM, [1])
        saved(one, tmp_path / name)
    before = saved(engine, tmp_path / "before")
    for name in ("rounded", "lora"):
        with pytest.raises(CheckpointMismatch):
            engine.load_state("run", tmp_path / name, with_optimizer=True)
    with pytest.raises(CheckpointMismatch):
        lora.load_state("run", tmp_path / "full", with_optimizer=False)
    assert saved(engine, tmp_path / "after") == before
    engine.load_state("run", tmp_path / "rounded", with_optimizer=False)
    assert torch.equal(weights(engine)["model.norm.weight"], weights(other)["model.norm.weight"].float())


@pytest.mark.parametrize(("kept", "weight_bytes"), [("float32", 4), ("masters", 4), ("rounded", 2)])
def test_weights_are_kept_in_the_dtype_that_was_chosen(make_engine, tmp_path, kept, weight_bytes):
    engine = make_engine(kept)
    saved(engine, tmp_path / "state")
    tensors = load_file(tmp_path / "state" / "model.safetensors")
    assert {tensor.element_size() for tensor in tensors.values()} == {weight_bytes}


def test_a_deleted_run_leaves_nothing(tmp_path):
    engine = PeftEngine(EngineOptions(str(make_tiny_llama(tmp_path)), "tiny"))
    engine.create_run("run", FullParameters())
    engine.delete_run("run")
    engine.create_run("run", FullParameters())
    steps(engine, ADAM, [0])


def architecture_engine(name, directory, kept):
    dtype, storage = KEPT[kept]
    make_architecture(name, directory)
    engine = PeftEngine(EngineOptions(str(directory), name, dtype=dtype))
    engine.create_run("run", FullParameters(storage))
    return engine


def test_a_gradient_that_is_a_view_steps_the_weights_that_it_belongs_to(tmp_path):
    engine = architecture_engine("gpt_oss", tmp_path, "float32")
    token = Datum([5], {"target_tokens": [5], "weights": [1.0]})  # of one token, the sinks' gradients are views
    engine.forward_backward("run", [token], ForwardBackwardSpec("cross_entropy"))
    expected = gradients(engine)
    engine.optim_step("run", AdamParams())
    moments = engine.runs["run"].optimizer.tensors
    for name, gradient in expected.items():
        torch.testing.assert_close(moments[f"exp_avg.{name}"], 0.1 * gradient)


@pytest.mark.parametrize("kept", ["masters", "rounded"])
def test_weights_that_the_base_keeps_in_float32_are_computed_stepped_and_written_in_float32(tmp_path, kept):
    engine = architecture_engine("ernie4_5_moe", tmp_path / "model", kept)
    run, base = engine.runs["run"], {name: weight.dtype for name, weight in engine.model.named_parameters()}
    assert {name: weight.dtype for name, weight in run.parameters.items()} == {
        name.replace(".base_layer.", "."): dtype for name, dtype in base.items()
    }
    exact = {name: weight for name, weight in run.parameters.items() if weight.dtype is torch.float32}
    assert 0 < len(exact) < len(run.parameters)
    token = Datum([5, 6, 7], {"target_tokens": [5, 6, 7], "weights": [1.0] * 3})
    engine.forward_backward("run", [token], ForwardBackwardSpec("cross_entropy"))
    expected = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in exact.items()}
    for name, weight in expected.items():
        weight.grad = exact[name].grad.clone()
    AdamW(expected, ADAM).step(ADAM, 1, engine.optim_step("run", ADAM).grad_norm)
    assert all(torch.equal(exact[name], weight) for name, weight in expected.items())
    (tmp_path / "saved").mkdir()
    engine.save_adapter("run", tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert stock.dtype is torch.bfloat16
    computed = {name: parameter.detach() for name, parameter in run.parameters.items()}
    torch.testing.assert_close(dict(stock.named_parameters()), computed, rtol=0, atol=0)


@pytest.mark.parametrize("kept", ["masters", "rounded"])
def test_a_model_that_keeps_a_few_weights_in_float32_resumes(tmp_path, kept):
    engine = architecture_engine("ernie4_5_moe", tmp_path / "model", kept)
    token = Datum([5, 6, 7], {"target_tokens": [5, 6, 7], "weights": [1.0] * 3})
    engine.forward_backward("run", [token], ForwardBackwardSpec("cross_entropy"))
    engine.optim_step("run", AdamParams())
    (tmp_path / "state").mkdir()
    engine.save_state("run", tmp_path / "state")
    before = weights(engine)
    engine.load_state("run", tmp_path / "state", with_optimizer=True)
    assert all(torch.equal(before[name], weight) for name, weight in weights(engine).items())
