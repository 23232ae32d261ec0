"""The trainer's engine gives the same results on a GPU as on a CPU."""

import numpy as np
import pytest
import torch
from support.models.engine_cases import ADAM, make_data, weights
from support.models.tiny_models import make_tiny_llama

from paceline.types import ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

pytestmark = pytest.mark.gpu

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "grpo")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("gpu") / "model")


def make_engine(model, **options):
    engine = PeftEngine(EngineOptions(str(model), "tiny", **options))
    engine.create_run("run", LoraConfig(rank=4, seed=3))
    return engine


def data_for(loss):
    data = make_data()
    unused = {"logprobs", "advantages"} if loss == "cross_entropy" else {"weights"}
    for datum in data:
        for name in unused:
            del datum.loss_fn_inputs[name]
    return data


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_steps_equal_those_of_the_cpu(model, loss):
    outcomes = []
    for device in ("cpu", "cuda"):
        engine = make_engine(model, device=device)
        first = engine.forward_backward("run", data_for(loss), ForwardBackwardSpec(loss))
        step = engine.optim_step("run", ADAM)
        outcomes.append((first.metrics["loss:sum"], step.grad_norm))
    np.testing.assert_allclose(outcomes[1], outcomes[0], rtol=1e-4)


def test_a_seed_gives_the_weights_that_it_gives_on_a_cpu(model):
    on_cpu, on_gpu = (weights(make_engine(model, device=device)) for device in ("cpu", "cuda"))
    for name, values in on_gpu.items():
        assert torch.equal(values.cpu(), on_cpu[name])


def test_bfloat16_stays_close_to_float32(model):
    exact, fast = (make_engine(model, device="cuda", dtype=dtype) for dtype in ("float32", "bfloat16"))
    data = data_for("cross_entropy")
    losses = [
        engine.forward_backward("run", data, ForwardBackwardSpec("cross_entropy", forward_only=True)).metrics[
            "loss:sum"
        ]
        for engine in (exact, fast)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_state_checkpoint_restores_every_weight_on_a_gpu(model, tmp_path):
    engine = make_engine(model, device="cuda")
    engine.forward_backward("run", data_for("cross_entropy"), ForwardBackwardSpec("cross_entropy"))
    engine.optim_step("run", ADAM)
    engine.save_state("run", tmp_path)
    other = make_engine(model, device="cuda")
    assert other.load_state("run", tmp_path, with_optimizer=True).step == 1
    for name, values in weights(engine).items():
        assert torch.equal(values, weights(other)[name])
