"""Activation checkpointing, which trades speed for memory, changes neither losses nor gradients."""

from __future__ import annotations

import pytest
import torch
from support.models.engine_cases import MAKERS, gradients, make_data, train, warmed
from support.models.tiny_models import make_tiny_llama

from paceline.types import ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions


def make_engine(directory, *, dropout=0.0, **options):
    engine = PeftEngine(EngineOptions(str(directory), "tiny", **options))
    engine.create_run("run", LoraConfig(rank=4, seed=1, dropout=dropout))
    return engine


class Kept:
    """Holds what a forward pass keeps for the backward pass, except the model's weights."""

    def __init__(self, model):
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.storages = {}

    def __call__(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.storages[storage.data_ptr()] = storage
        return tensor

    @property
    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())


@pytest.mark.parametrize("model", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_computed_again_give_the_same_loss_and_gradients_to_the_last_bit(tmp_path, model, dtype):
    directory = MAKERS[model](tmp_path / "model")
    outcomes = []
    for recompute in (False, True):
        engine = warmed(make_engine(directory, dropout=0.3, dtype=dtype, activation_checkpointing=recompute))
        outcomes.append((train(engine).metrics["loss:sum"], gradients(engine)))
    (loss, expected), (again, actual) = outcomes
    assert again == loss
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_layers_computed_again_keep_less(tmp_path):
    directory, kept = make_tiny_llama(tmp_path / "model"), []
    for recompute in (False, True):
        engine = make_engine(directory, activation_checkpointing=recompute)
        counter = Kept(engine.model)
        with torch.autograd.graph.saved_tensors_hooks(counter, lambda tensor: tensor):
            train(engine, data=make_data((400,)))
        kept.append(counter.bytes)
    assert kept[1] < 0.5 * kept[0]


def test_layers_are_computed_once_where_there_is_no_backward_pass(tmp_path):
    engine = make_engine(make_tiny_llama(tmp_path / "model"), activation_checkpointing=True)
    calls = []
    engine.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    engine.forward_backward("run", make_data(), ForwardBackwardSpec("cross_entropy", forward_only=True))
    assert len(calls) == 1
    train(engine)
    assert len(calls) == 3
