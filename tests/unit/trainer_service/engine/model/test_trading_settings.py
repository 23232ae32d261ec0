"""Settings that trade speed for memory, or a slower start for speed, change neither losses nor gradients."""

from __future__ import annotations

import pytest
import torch
from support.models.engine_cases import MAKERS, gradients, make_data, train, warmed
from support.models.tiny_models import make_tiny_llama

from paceline.errors import Unsupported
from paceline.types import ForwardBackwardSpec, LoraConfig
from trainer_service.engine.model.fused import attention, mlp, norm
from trainer_service.engine.model.fused.blocks import RowWork
from trainer_service.engine.model.fused.compiler import check_compiler
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.peft_engine import PeftEngine


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
        counter = Kept(engine._model)
        with torch.autograd.graph.saved_tensors_hooks(counter, lambda tensor: tensor):
            train(engine, data=make_data((400,)))
        kept.append(counter.bytes)
    assert kept[1] < 0.5 * kept[0]


def test_layers_are_computed_once_where_there_is_no_backward_pass(tmp_path):
    engine = make_engine(make_tiny_llama(tmp_path / "model"), activation_checkpointing=True)
    calls = []
    engine._model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    engine.forward_backward("run", make_data(), ForwardBackwardSpec("cross_entropy", forward_only=True))
    assert len(calls) == 1
    train(engine)
    assert len(calls) == 3


def row_cases(rows, dtype):
    """Yield functions on rows with their tensors, including those that they write, and constants."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, other, dout, weight = draw(rows, 48), draw(rows, 48), draw(rows, 48), draw(48)
    inverse, cosines = torch.rand(rows, 1, generator=generator), draw(1, rows, 8)
    heads = draw(rows, 3, 16).transpose(0, 1)
    wide = norm._each_row(weight, x)
    yield norm._normalise, (x, torch.zeros_like(x), torch.zeros(rows, 1), wide), {"eps": 1e-5}
    yield norm._normalise_backward, (x, dout, torch.zeros_like(x), inverse, wide), {}
    yield mlp._swiglu, (x, other, torch.zeros_like(x)), {}
    yield mlp._swiglu_backward, (x, other, dout, torch.zeros_like(x), torch.zeros_like(x)), {}
    yield attention._rotate, (heads, torch.zeros(3, rows, 16, dtype=dtype), cosines, cosines.flip(1)), {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_work_on_rows_gives_what_it_gives_as_written(dtype):
    written, compiled = RowWork(), RowWork("aot_eager")
    for rows in (7, 300):
        for ours, theirs in zip(row_cases(rows, dtype), row_cases(rows, dtype), strict=True):
            for work, (body, tensors, constants) in ((written, ours), (compiled, theirs)):
                with torch.no_grad():
                    work(body, *tensors, dim=1 if body is attention._rotate else 0, **constants)
            for one, other in zip(ours[1], theirs[1], strict=True):
                # When compiled, intermediate values of a body are not rounded to bfloat16.
                rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unsupported, match=r"needs a C\+\+ compiler, g\+\+"):
        PeftEngine(EngineOptions(str(make_tiny_llama(tmp_path / "model")), "tiny", compile=True))
    compiler = tmp_path / "c++-of-mine"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", compiler.name)
    check_compiler("cpu")
