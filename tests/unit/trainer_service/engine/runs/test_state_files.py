"""Runs on disk: resume bit for bit, PEFT's layout, and no change by a checkpoint that does not fit."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from peft import LoraConfig as PeftLoraConfig
from safetensors.torch import load_file, save_file
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama
from transformers import AutoModelForCausalLM

from paceline.errors import CheckpointMismatch, ChecksumMismatch, InvalidArgument, NoGradient
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.01)
LORA = LoraConfig(rank=4, dropout=0.3, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def make_engine(model):
    def make(lora=LORA, **options):
        engine = PeftEngine(EngineOptions(str(model), "tiny", **options))
        engine.create_run("run", lora)
        return engine

    return make


@pytest.fixture
def new_directory(tmp_path):
    count = iter(range(100))

    def make():
        directory = tmp_path / str(next(count))
        directory.mkdir()
        return directory

    return make


def make_data(seed):
    rng = np.random.default_rng(seed)
    return [
        Datum(
            rng.integers(0, VOCAB_SIZE, n).astype(np.int32),
            {"target_tokens": rng.integers(0, VOCAB_SIZE, n), "weights": np.ones(n, np.float32)},
        )
        for n in (6, 11)
    ]


def forward_backward(engine, seed, *, forward_only=False):
    return engine.forward_backward(
        "run", make_data(seed), ForwardBackwardSpec("cross_entropy", forward_only=forward_only)
    )


def train(engine, steps):
    for step in steps:
        forward_backward(engine, step)
        engine.optim_step("run", ADAM)


def saved(engine, directory):
    """Return the bytes of every file that save_state writes."""
    engine.save_state("run", directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_and_two_steps_are_four_to_the_last_bit(make_engine, new_directory, dtype):
    straight = make_engine(dtype=dtype)
    train(straight, range(4))
    first, second = make_engine(dtype=dtype), make_engine(dtype=dtype)
    train(first, range(2))
    directory = new_directory()
    first.save_state("run", directory)
    train(second, [9])  # It must leave no trace.
    assert second.load_state("run", directory, with_optimizer=True).step == 2
    train(second, range(2, 4))
    assert saved(second, new_directory()) == saved(straight, new_directory())


def test_a_waiting_gradient_is_resumed_to_the_last_bit(make_engine, new_directory):
    straight = make_engine()
    train(straight, range(2))
    forward_backward(straight, 2)
    forward_backward(straight, 3)
    expected = straight.optim_step("run", ADAM)
    first, second = make_engine(), make_engine()
    train(first, range(2))
    forward_backward(first, 2)
    directory = new_directory()
    first.save_state("run", directory)
    second.load_state("run", directory, with_optimizer=True)
    forward_backward(second, 3)
    got = second.optim_step("run", ADAM)
    assert (got.step, got.tokens, got.grad_norm) == (expected.step, expected.tokens, expected.grad_norm)
    assert saved(second, new_directory()) == saved(straight, new_directory())


def test_saving_changes_nothing_and_the_same_state_gives_the_same_bytes(make_engine, new_directory):
    engine = make_engine()
    train(engine, range(1))
    forward_backward(engine, 1)
    assert saved(engine, new_directory()) == saved(engine, new_directory())


def test_loading_without_optimizer_takes_the_weights_alone(make_engine, new_directory):
    first, second = make_engine(), make_engine()
    train(first, range(2))
    directory = new_directory()
    first.save_state("run", directory)
    train(second, range(1))
    forward_backward(second, 1)
    assert second.load_state("run", directory, with_optimizer=False).step == 0
    expected = forward_backward(first, 5, forward_only=True).metrics
    assert forward_backward(second, 5, forward_only=True).metrics == expected
    with pytest.raises(NoGradient):
        second.optim_step("run", ADAM)
    assert b"exp_avg" not in saved(second, new_directory())["optimizer.safetensors"]


def test_files_are_safetensors_and_json(make_engine, new_directory):
    engine = make_engine()
    train(engine, range(1))
    assert set(saved(engine, new_directory())) == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "trainer_state.json",
    }


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4, alpha=6.5),
        LoraConfig(rank=4, layers=(1,)),
        LoraConfig(rank=4, train_attn=False, train_unembed=True, use_rslora=True),
        LoraConfig(rank=4, target_modules=("q_proj", "mlp.down_proj")),
        LoraConfig(rank=4, target_modules=("v_proj", "lm_head"), layers=(0,)),
    ],
)
def test_published_adapter_gives_the_same_logprobs_in_peft(make_engine, new_directory, model, lora):
    engine = make_engine(lora)
    train(engine, range(3))
    directory = new_directory()
    engine.save_adapter("run", directory)
    assert {path.name for path in directory.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stock = PeftModel.from_pretrained(base, directory).eval()
    results = forward_backward(engine, 8, forward_only=True).loss_fn_outputs
    for datum, result in zip(make_data(8), results, strict=True):
        tokens = torch.from_numpy(datum.model_input.astype(np.int64))[None]
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        expected = stock(input_ids=tokens).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(result["logprobs"], expected.detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "adapter_dtype": "float32"}, torch.float32),
    ],
)
def test_adapter_dtype_is_that_of_the_base_unless_chosen(make_engine, new_directory, options, dtype):
    engine, directory = make_engine(**options), new_directory()
    engine.save_adapter("run", directory)
    tensors = load_file(directory / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["inference_mode"] is True


def test_an_exported_adapter_names_its_base_so_that_peft_finds_it(make_engine, new_directory, model):
    engine = make_engine()
    train(engine, range(2))
    directory = new_directory()
    engine.save_adapter("run", directory)
    stock = AutoPeftModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert stock.peft_config["default"].base_model_name_or_path == str(model)


def test_a_base_model_of_a_hub_is_named_by_its_whole_id():
    assert EngineOptions("Org/Model", "Model").base_reference == "Org/Model"


@pytest.mark.parametrize("alpha", [16, 16.0, 2.5])
def test_alpha_is_written_as_peft_reads_it(make_engine, new_directory, alpha):
    engine, directory = make_engine(LoraConfig(rank=4, alpha=alpha)), new_directory()
    engine.save_adapter("run", directory)
    assert json.loads((directory / "adapter_config.json").read_text())["lora_alpha"] == alpha
    engine.load_state("run", directory, with_optimizer=False)


EVERY_MODULE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("start", "targets", "lora"),
    [
        (False, EVERY_MODULE, LoraConfig(rank=4)),
        ("gaussian", EVERY_MODULE, LoraConfig(rank=4)),
        (False, None, LoraConfig(rank=4, target_modules=("q_proj", "v_proj"))),
    ],
    ids=["zero", "gaussian", "peft's own default"],
)
def test_an_adapter_made_by_peft_loads(make_engine, new_directory, model, start, targets, lora):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = PeftLoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=start)
    made = get_peft_model(base, config).eval()
    directory = new_directory()
    made.save_pretrained(directory)
    engine = make_engine(lora)
    assert engine.load_state("run", directory, with_optimizer=False).step == 0
    datum, result = make_data(8)[1], forward_backward(engine, 8, forward_only=True).loss_fn_outputs[1]
    logits = made(input_ids=torch.from_numpy(datum.model_input.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(result["logprobs"], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointMismatch):
        engine.load_state("run", directory, with_optimizer=True)


def rewrite(name, change):
    """Return a function that damages a safetensors file by changing its tensors."""

    def damage(directory):
        tensors = load_file(directory / name)
        change(tensors)
        save_file(tensors, directory / name)

    return damage


def edit_json(name, **fields):
    def damage(directory):
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(content | fields))

    return damage


def first_key(tensors, prefix):
    return next(key for key in sorted(tensors) if key.startswith(prefix))


def reshape_last(tensors):
    key = max(tensors)
    tensors[key] = torch.zeros(3, 3)


def to_half(tensors):
    key = first_key(tensors, "exp_avg")
    tensors[key] = tensors[key].half()


MISFITS = {
    "weights missing": lambda d: (d / "adapter_model.safetensors").unlink(),
    "optimizer missing": lambda d: (d / "optimizer.safetensors").unlink(),
    "state missing": lambda d: (d / "trainer_state.json").unlink(),
    "weight gone": rewrite("adapter_model.safetensors", lambda t: t.pop(max(t))),
    "weight too many": rewrite("adapter_model.safetensors", lambda t: t.update(extra=torch.zeros(1))),
    "weight of another shape": rewrite("adapter_model.safetensors", reshape_last),
    "moment gone": rewrite("optimizer.safetensors", lambda t: t.pop(first_key(t, "exp_avg_sq"))),
    "moment of another dtype": rewrite("optimizer.safetensors", to_half),
    "gradient gone": rewrite("optimizer.safetensors", lambda t: t.pop(first_key(t, "grad"))),
    "random state gone": rewrite("optimizer.safetensors", lambda t: t.pop("rng_state")),
    "other rank": edit_json("adapter_config.json", r=8),
    "other alpha": edit_json("adapter_config.json", lora_alpha=1),
    "rslora": edit_json("adapter_config.json", use_rslora=True),
    "dora": edit_json("adapter_config.json", use_dora=True),
    "alphas of their own": edit_json("adapter_config.json", alpha_pattern={"q_proj": 16}),
    "a base changed by the start": edit_json("adapter_config.json", init_lora_weights="pissa"),
    "a variant that is not known": edit_json("adapter_config.json", alora_invocation_tokens=[1]),
    "not LoRA": edit_json("adapter_config.json", peft_type="LOHA"),
    "other format": edit_json("trainer_state.json", format_version=99),
    "not JSON": lambda d: (d / "trainer_state.json").write_text("{"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(make_engine, new_directory, misfit):
    engine = make_engine()
    train(engine, range(2))
    forward_backward(engine, 2)
    directory = new_directory()
    engine.save_state("run", directory)
    MISFITS[misfit](directory)
    train(engine, range(3, 4))
    forward_backward(engine, 4)
    before = saved(engine, new_directory())
    with pytest.raises(CheckpointMismatch):
        engine.load_state("run", directory, with_optimizer=True)
    assert saved(engine, new_directory()) == before


def test_a_checkpoint_whose_configuration_is_none_is_refused_by_the_name_of_its_field(make_engine, new_directory):
    engine, directory = make_engine(), new_directory()
    train(engine, range(1))
    before = saved(engine, directory)
    edit_json("adapter_config.json", r=None)(directory)
    with pytest.raises(InvalidArgument, match=r"^adapter_config\.r: is not a whole number"):
        engine.load_state("run", directory, with_optimizer=True)
    assert saved(engine, new_directory()) == before


def test_damaged_tensors_change_nothing(make_engine, new_directory):
    engine = make_engine()
    train(engine, range(1))
    directory = new_directory()
    before = saved(engine, directory)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        copy = new_directory()
        shutil.copytree(directory, copy, dirs_exist_ok=True)
        (copy / name).write_bytes(before[name][:-100])
        with pytest.raises(ChecksumMismatch):
            engine.load_state("run", copy, with_optimizer=True)
    assert saved(engine, new_directory()) == before
