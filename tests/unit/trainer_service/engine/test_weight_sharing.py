"""A trainer's engine on weights lent by another process: nothing copied, nothing missing, the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support.models.engine_cases import make_data, train, warmed, weights
from support.models.tiny_models import make_tiny_llama, make_tiny_qwen2, make_tiny_qwen3
from transformers import AutoModelForCausalLM

from paceline.base_model.weight_sharing import (
    SEGMENT,
    BaseManifest,
    SharedStorage,
    SharedTensor,
    claim,
    clear,
    is_lent,
    read_base,
)
from paceline.errors import BaseMismatch, BaseUnavailable
from paceline.types import ForwardBackwardSpec, FullParameters, LoraConfig
from trainer_service.engine.model.base_model import load_base_model
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

MODELS = {
    "llama, scaled rope": lambda path: make_tiny_llama(path, scaled_rope=True),
    "llama, tied, scaled rope": lambda path: make_tiny_llama(path, tied=True, scaled_rope=True),
    "qwen2, tied, biases": make_tiny_qwen2,
    "qwen3, norms on q and k": make_tiny_qwen3,
}
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def lend(model, directory, generation="first"):
    """Lend a saved model's weights as a sampler does, in this process; return manifest and lock."""
    lock, tensors, data = claim(directory), [], b""
    state = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    places = {}
    for name, weight in state.items():
        if weight.data_ptr() not in places:
            places[weight.data_ptr()] = len(data)
            data += weight.numpy().tobytes()
        place = places[weight.data_ptr()]
        tensors.append(SharedTensor(name, "float32", tuple(weight.shape), weight.stride(), 0, place))
    (directory / f"{SEGMENT}{generation}").write_bytes(data)
    storage = SharedStorage(len(data), f"{SEGMENT}{generation}")
    manifest = BaseManifest(generation, "tiny", writable=False, storages=[storage], tensors=tensors)
    manifest.write(directory)
    return manifest, lock


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tied", tied=True)


@pytest.fixture
def lent(llama, tmp_path):
    manifest, lock = lend(llama, tmp_path / "base")
    yield manifest
    os.close(lock)


@pytest.fixture
def options(llama, tmp_path):
    return EngineOptions(str(llama), "tiny", base_dir=str(tmp_path / "base"))


def change(manifest, directory, name, **fields):
    """Write a manifest in which one tensor is changed."""
    tensors = [replace(tensor, **fields) if tensor.name == name else tensor for tensor in manifest.tensors]
    replace(manifest, tensors=tensors).write(directory)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_runs_on_lent_weights_give_the_bits_of_runs_on_weights_of_their_own(make, tmp_path):
    model = make(tmp_path / "model")
    _, lock = lend(model, tmp_path / "base")
    engines = [PeftEngine(EngineOptions(str(model), "tiny", base_dir=base)) for base in ("", str(tmp_path / "base"))]
    for engine in engines:
        engine.create_run("run", LoraConfig(rank=4, train_unembed=True))
    own, borrowed = (train(warmed(engine)) for engine in engines)
    for ours, theirs in zip(own.loss_fn_outputs, borrowed.loss_fn_outputs, strict=True):
        assert ours["logprobs"].tobytes() == theirs["logprobs"].tobytes()
    ours, theirs = map(weights, engines)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    os.close(lock)


def test_every_weight_lies_in_the_lender_s_memory_and_stays_as_it_is(lent, options, tmp_path):
    segment = tmp_path / "base" / lent.storages[0].file
    before = segment.read_bytes()
    engine = PeftEngine(options)
    engine.create_run("run", LoraConfig(rank=4))
    frozen = [weight for name, weight in engine.model.named_parameters() if "lora_" not in name]
    assert {weight.untyped_storage().nbytes() for weight in frozen} == {len(before)}
    assert len({weight.untyped_storage().data_ptr() for weight in frozen}) == 1
    warmed(engine)
    assert segment.read_bytes() == before


def test_tied_weights_are_one_view(lent, options):
    model = load_base_model(options)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_full_parameter_run_trains_weights_of_its_own(lent, options, tmp_path):
    segment = tmp_path / "base" / lent.storages[0].file
    before = segment.read_bytes()
    engine = PeftEngine(options)
    engine.create_run("run", FullParameters())
    warmed(engine)
    assert segment.read_bytes() == before


def test_the_first_missing_weight_is_named(lent, options, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    replace(lent, tensors=[tensor for tensor in lent.tensors if tensor.name != name]).write(tmp_path / "base")
    with pytest.raises(BaseMismatch, match=name):
        PeftEngine(options)


def test_a_weight_that_the_model_lacks_is_refused(lent, options, tmp_path):
    extra = replace(lent.tensors[0], name="model.layers.0.self_attn.q_norm.weight")
    replace(lent, tensors=[*lent.tensors, extra]).write(tmp_path / "base")
    with pytest.raises(BaseMismatch, match="q_norm"):
        PeftEngine(options)


def test_a_head_that_only_the_trainer_ties_is_refused(lent, options, tmp_path):
    layer = next(tensor for tensor in lent.tensors if tensor.name == EMBEDDINGS)
    change(lent, tmp_path / "base", HEAD, offset=layer.offset + 64)
    with pytest.raises(BaseMismatch, match=f"{HEAD} is tied"):
        PeftEngine(options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": (64, 260)}, "has shape"),
        ({"offset": 1 << 30}, "no memory for it"),
        ({"offset": 2}, "no memory for it"),
        ({"dtype": "bfloat16"}, "PACELINE_SAMPLER_DTYPE and PACELINE_TRAINER_DTYPE to the same"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused_with_what_to_do(lent, options, tmp_path, fields, message):
    change(lent, tmp_path / "base", EMBEDDINGS, **fields)
    with pytest.raises(BaseMismatch, match=message):
        PeftEngine(options)


def test_weights_that_change_are_not_computed_with(lent, options, tmp_path):
    replace(lent, writable=True).write(tmp_path / "base")
    segment, before = tmp_path / "base" / lent.storages[0].file, PeftEngine(options)
    segment.write_bytes(bytes(lent.storages[0].size))
    assert all(weight.any() for name, weight in before.model.named_parameters() if "lora_" not in name)


def test_another_model_s_weights_are_refused(lent, options):
    with pytest.raises(BaseMismatch, match="lends tiny"):
        PeftEngine(replace(options, model_name="other"))


@pytest.mark.usefixtures("lent")
def test_weights_in_the_host_s_memory_are_refused_for_a_gpu(options):
    with pytest.raises(BaseMismatch, match="host's memory"):
        PeftEngine(replace(options, device="cuda"))


def test_a_damaged_manifest_is_refused(lent, options, tmp_path):
    (tmp_path / "base" / "manifest.json").write_text("{}")
    with pytest.raises(BaseMismatch, match="not a manifest"):
        PeftEngine(options)


def test_a_directory_has_one_owner_and_weights_go_with_it(llama, options, tmp_path):
    directory = tmp_path / "base"
    with pytest.raises(BaseUnavailable):
        read_base(directory)
    _, lock = lend(llama, directory)
    with pytest.raises(BlockingIOError):
        claim(directory)
    assert is_lent(directory, "first")
    os.close(lock)
    assert not is_lent(directory, "first")
    with pytest.raises(BaseUnavailable):
        PeftEngine(options)
    _, lock = lend(llama, directory, "second")
    assert [path.name for path in directory.glob(f"{SEGMENT}*")] == [f"{SEGMENT}second"]
    assert is_lent(directory, "second")
    assert not is_lent(directory, "first")
    os.close(lock)


def test_another_user_s_directory_is_neither_used_nor_trusted(lent, tmp_path, monkeypatch):
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(BaseMismatch, match="another user"):
        read_base(tmp_path / "base")
    with pytest.raises(PermissionError, match="another user"):
        claim(tmp_path / "base")


def test_a_killed_owner_gives_its_directory_back(tmp_path):
    read = "from paceline.base_model.weight_sharing import *"
    program = f"{read}; claim(Path({str(tmp_path)!r})); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.read(1)
        with pytest.raises(BlockingIOError):
            claim(tmp_path)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        os.close(claim(tmp_path))


def test_what_was_borrowed_outlives_its_files(lent, options, tmp_path):
    engine = PeftEngine(options)
    engine.create_run("run", LoraConfig(rank=4))
    before = engine.forward_backward("run", make_data(), ForwardBackwardSpec("cross_entropy", forward_only=True))
    clear(tmp_path / "base")
    after = engine.forward_backward("run", make_data(), ForwardBackwardSpec("cross_entropy", forward_only=True))
    assert before.loss_fn_outputs[0]["logprobs"].tobytes() == after.loss_fn_outputs[0]["logprobs"].tobytes()
