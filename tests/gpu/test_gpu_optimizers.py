"""On a GPU, optimizers step as on a CPU and resume to the last bit; adamw_cpu keeps no moments there."""

import pytest
import torch
from support.models.engine_cases import make_data, saved, train
from support.models.optimizer_cases import PARAMS, make_weights, step_with
from support.models.tiny_models import make_tiny_llama
from torch import nn

from paceline.types import LoraConfig
from trainer_service.engine.optimizers import adamw
from trainer_service.engine.optimizers.make import make_optimizer
from trainer_service.engine.optimizers.rounded import RoundedOptimizer
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

pytestmark = pytest.mark.gpu

DRAWN_ON_THE_DEVICE = {"apollo", "apollo_mini"}


def trained_on(device, params, steps=5):
    weights = {name: nn.Parameter(weight.detach().to(device)) for name, weight in make_weights().items()}
    optimizer = make_optimizer(weights, params)
    for step in range(1, steps + 1):
        step_with(optimizer, weights, params, step)
    return weights, optimizer


@pytest.mark.parametrize("name", PARAMS.keys() - DRAWN_ON_THE_DEVICE)
def test_steps_equal_those_of_the_cpu(name):
    (ours, _), (theirs, _) = (trained_on(device, PARAMS[name]) for device in ("cuda", "cpu"))
    for key, weight in ours.items():
        torch.testing.assert_close(weight.detach().cpu(), theirs[key].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 100, 1 << 24])
def test_adamw_cpu_is_adamw_to_the_last_bit_and_pins_its_moments(monkeypatch, batch):
    monkeypatch.setattr(adamw, "BATCH_ELEMENTS", batch)
    (ours, optimizer), (theirs, reference) = (trained_on("cuda", PARAMS[name]) for name in ("adamw_cpu", "adamw"))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(tensor.is_pinned() for tensor in optimizer.tensors.values())
    assert all(torch.equal(tensor, reference.tensors[key].cpu()) for key, tensor in optimizer.tensors.items())


def test_adamw_cpu_reserves_the_memory_of_a_step_on_bfloat16_weights():
    count = 1 << 20
    weights = {"weight": nn.Parameter(torch.zeros(count, dtype=torch.bfloat16, device="cuda"))}
    optimizer = RoundedOptimizer(weights, PARAMS["adamw_cpu"], torch.Generator("cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.reserve()
    floats = 2 + 3 * 2  # float32 weights and noise; three batches of both moments
    assert torch.cuda.max_memory_allocated() - before >= 4 * floats * count


@pytest.mark.parametrize("name", PARAMS)
def test_two_and_two_steps_are_four_to_the_last_bit(tmp_path, name):
    model = make_tiny_llama(tmp_path / "model")
    engines = []
    for _ in range(3):
        engines.append(PeftEngine(EngineOptions(str(model), "tiny", device="cuda")))
        engines[-1].create_run("run", LoraConfig(rank=4, dropout=0.3, seed=3))
    straight, first, second = engines

    def steps(engine, seeds):
        for seed in seeds:
            train(engine, data=make_data(seed=seed))
            engine.optim_step("run", PARAMS[name])

    steps(straight, range(4))
    steps(first, range(2))
    saved(first, tmp_path / "half")
    second.load_state("run", tmp_path / "half", with_optimizer=True)
    steps(second, range(2, 4))
    assert saved(second, tmp_path / "second") == saved(straight, tmp_path / "straight")
