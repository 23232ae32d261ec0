"""Passes that do not fit into memory, and losses that are not finite: reported, refused if asked, no run harmed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models.engine_cases import ADAM, gradients, make_data, train, warmed, weights
from support.models.tiny_models import make_tiny_llama

from paceline.errors import NonFiniteGradient, NonFiniteLoss, OutOfMemory
from paceline.types import ForwardBackwardSpec, FullParameters, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

RUNS = {"lora": LoraConfig(rank=4, dropout=0.2), "full": FullParameters()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(params=RUNS)
def make_engine(request, model):
    def make(fitting=None):
        """Make an engine with a run whose passes run out of memory above `fitting` tokens."""
        engine = PeftEngine(EngineOptions(model, "tiny", pack_tokens=100))
        engine.create_run("run", RUNS[request.param])
        own = getattr(engine.runs["run"], "model", engine.model)
        if fitting:

            def exhaust(_module, args, _output):
                if args[0].shape[-1] > fitting:
                    torch.empty(1 << 60)  # The allocator refuses.

            own.get_input_embeddings().register_forward_hook(exhaust)
        return engine

    return make


def with_nan():
    data = make_data((5, 7), masked=False)
    data[1].loss_fn_inputs["weights"][2:4] = np.nan
    return data


def test_a_pass_that_does_not_fit_is_done_in_smaller_ones(make_engine):
    narrow, wide = make_engine(fitting=30), make_engine()
    outputs = [train(engine, data=make_data((5, 17, 9, 30, 8))) for engine in (narrow, wide)]
    assert outputs[0].metrics == pytest.approx(outputs[1].metrics, rel=1e-4)
    for one, other in zip(gradients(narrow).values(), gradients(wide).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item() + 1e-7)


def test_a_sequence_that_does_not_fit_is_refused_with_what_would(make_engine):
    engine = make_engine(fitting=30)
    train(engine)
    before, rng_state = gradients(engine), engine.runs["run"].rng_state.clone()
    with pytest.raises(OutOfMemory) as caught:
        train(engine, data=make_data((5, 80, 9)))
    assert caught.value.metadata == {"tokens": "80", "fitting_tokens": "20"}
    assert caught.value.field == "data[1]"
    assert "first 20 would fit" in caught.value.message
    torch.testing.assert_close(gradients(engine), before, rtol=0, atol=0)
    assert torch.equal(engine.runs["run"].rng_state, rng_state)
    train(engine, data=make_data((5, 20, 9)))
    assert engine.optim_step("run", ADAM).step == 1


def test_where_nothing_fits_that_is_said(make_engine):
    engine = make_engine(fitting=0.5)
    with pytest.raises(OutOfMemory) as caught:
        train(engine)
    assert caught.value.metadata["fitting_tokens"] == "0"


def test_a_run_that_does_not_fit_harms_no_other(model):
    engine, alone = (PeftEngine(EngineOptions(model, "tiny", pack_tokens=100)) for _ in range(2))
    for name in ("large", "small"):
        engine.create_run(name, LoraConfig(rank=4))
    alone.create_run("small", LoraConfig(rank=4))

    def exhaust(_module, args, _output):
        if args[0].shape[-1] > 30:
            torch.empty(1 << 60)

    engine.model.get_input_embeddings().register_forward_hook(exhaust)
    spec = ForwardBackwardSpec("cross_entropy")
    jobs = [engine.begin("large", make_data((40,)), spec), engine.begin("small", make_data((9,)), spec)]
    while any(job.waiting for job in jobs):
        engine.advance(lambda _: None)
    with pytest.raises(OutOfMemory):
        jobs[0].output()
    expected = train(alone, "small", data=make_data((9,)))
    assert jobs[1].output().metrics == expected.metrics
    torch.testing.assert_close(gradients(engine, "small"), gradients(alone, "small"), rtol=0, atol=0)


def test_what_is_not_finite_is_counted_and_the_step_refused(make_engine):
    engine = make_engine()
    metrics = train(engine, data=with_nan()).metrics
    assert (metrics["nonfinite:sum"], metrics["nonfinite_gradient:sum"] > 0) == (2, True)
    before = weights(engine)
    with pytest.raises(NonFiniteGradient):
        engine.optim_step("run", ADAM)
    torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)
    forward = engine.forward_backward(
        "run", with_nan(), ForwardBackwardSpec("cross_entropy", forward_only=True)
    ).metrics
    assert forward["nonfinite:sum"] == 2
    assert "nonfinite_gradient:sum" not in forward
    assert train(engine).metrics["nonfinite:sum"] == 0


def test_a_call_that_asks_for_it_is_refused_before_it_has_added_anything(make_engine):
    engine = warmed(make_engine())
    train(engine)
    before, rng_state = gradients(engine), engine.runs["run"].rng_state.clone()
    with pytest.raises(NonFiniteLoss) as caught:
        engine.forward_backward("run", with_nan(), ForwardBackwardSpec("cross_entropy", refuse_non_finite=True))
    assert caught.value.metadata["positions"] == "2"
    assert int(caught.value.metadata["gradient_elements"]) > 0
    torch.testing.assert_close(gradients(engine), before, rtol=0, atol=0)
    assert torch.equal(engine.runs["run"].rng_state, rng_state)
    assert engine.optim_step("run", ADAM).step == 2
    train_output = engine.forward_backward(
        "run", make_data(), ForwardBackwardSpec("cross_entropy", refuse_non_finite=True)
    )
    assert train_output.metrics["nonfinite_gradient:sum"] == 0
