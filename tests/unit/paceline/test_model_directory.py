"""A model that is not whole, or not the one that its configuration describes, is refused by name by every engine."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.tiny_models import make_tiny, make_tiny_llama
from transformers import AutoModelForCausalLM

from paceline.errors import PacelineError
from sampler_service.engine.hf.engine import HfEngine
from sampler_service.engine.model_files import check_model
from sampler_service.engine.options import EngineOptions as SamplerOptions
from sampler_service.engine.protocol import EngineUnfit
from trainer_service.engine.model.base_model import load_base_model
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

WEIGHTS = "model.safetensors"


def without(*names):
    def damage(directory):
        tensors = load_file(directory / WEIGHTS)
        save_file({name: t for name, t in tensors.items() if name not in names}, directory / WEIGHTS)

    return damage


def also(**tensors):
    def damage(directory):
        added = {name.replace("__", "."): torch.ones(size) for name, size in tensors.items()}
        save_file(load_file(directory / WEIGHTS) | added, directory / WEIGHTS)

    return damage


def configured(**fields):
    def damage(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def written(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def as_pickles(directory):
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


def sharded(then):
    def damage(directory):
        model = AutoModelForCausalLM.from_pretrained(directory)
        (directory / WEIGHTS).unlink()
        model.save_pretrained(directory, max_shard_size="100KB")
        then(directory)

    return damage


def truncated(directory):
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-100])


def emptied(directory):
    shutil.rmtree(directory)
    directory.mkdir()


def misplaced(directory):
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = content["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(content))


def doubled(directory):
    first, second, *_ = sorted(directory.glob("model-*"))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.zeros_like(load_file(first)[name])}, second)


def without_metadata(directory):
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))


def as_integers(directory):
    tensors = load_file(directory / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: (tensors[name] * 10).to(torch.int8)}, directory / WEIGHTS)


def alone_as(name):
    def damage(directory):
        emptied(directory)
        (directory / name).write_bytes(b"{}")

    return damage


DAMAGES = {
    "no up_proj": (without("model.layers.0.mlp.up_proj.weight"), "model.layers.0.mlp.up_proj.weight is missing"),
    "no part of a fused layer": (without("model.layers.1.self_attn.k_proj.weight"), "k_proj.weight is missing"),
    "no head": (without("lm_head.weight"), "lm_head.weight is missing"),
    "no embedding": (without("model.embed_tokens.weight"), "model.embed_tokens.weight is missing"),
    "no last norm": (without("model.norm.weight"), "model.norm.weight is missing"),
    "no biases": (configured(attention_bias=True), "k_proj.bias.* and 5 other weights are missing"),
    "a layer too many": (configured(num_hidden_layers=1), "model.layers.1.* are in the files"),
    "a layer too few": (configured(num_hidden_layers=3), "model.layers.2.* are missing"),
    "a bias too many": (also(model__layers__0__self_attn__q_proj__bias=64), "q_proj.bias is in the files"),
    "a norm too many": (also(model__layers__0__q_norm__weight=32), "q_norm.weight is in the files"),
    "another vocabulary": (configured(vocab_size=300), r"lm_head.weight is \[260, 64\] in the files and \[300, 64\]"),
    "pickles alone": (as_pickles, r"pickled \(.bin\).*save_pretrained"),
    "a lost shard": (
        sharded(lambda d: next(d.glob("model-00002*")).unlink()),
        "index.json names model-00002-of-.*, which the directory lacks",
    ),
    "an index that is wrong": (sharded(misplaced), "lacks model.norm.weight, which .*index.json says it holds"),
    "a weight in two shards": (sharded(doubled), "model-00001-of-.* and model-00002-of-.* both hold "),
    "an index without metadata": (sharded(without_metadata), "index.json has no metadata; fetch or save"),
    "no index": (sharded(lambda d: (d / "model.safetensors.index.json").unlink()), "no model.safetensors.index.json"),
    "integers": (as_integers, r"q_proj.weight holds integers \(I8\) in model.safetensors, .*unquantised"),
    "a file cut off": (truncated, "model.safetensors has .* bytes, and its header describes"),
    "a pointer of Git LFS": (written(WEIGHTS, b"version https://git-lfs"), "pointer of Git LFS"),
    "an empty configuration": (written("config.json", b""), "config.json is not JSON"),
    "no object": (written("config.json", b"[]"), "config.json is no JSON object"),
    "no model_type": (written("config.json", b"{}"), "config.json names no model_type"),
    "no configuration": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "nothing": (emptied, "no config.json"),
    "GGUF": (alone_as("model.gguf"), "GGUF.*safetensors"),
    "an adapter": (alone_as("adapter_config.json"), "it is an adapter, not a model; give its base model"),
    "an adapter beside it": (written("adapter_config.json", b"{}"), "contains adapter_config.json"),
    "code of its own": (
        configured(model_type="own", auto_map={"AutoConfig": "a.B"}),
        r"its architecture \(own\) is code .* never run",
    ),
    "an unknown architecture": (configured(model_type="own"), "knows no model_type own"),
    "an unknown activation": (configured(hidden_act="zzz"), "config.json is wrong: hidden_act is 'zzz'"),
    "an unknown rotation": (
        configured(rope_parameters={"rope_type": "zzz", "rope_theta": 1e4}),
        "rope_parameters.rope_type is 'zzz'",
    ),
    "heads that do not divide": (configured(num_attention_heads=3), r"config.json is wrong: The hidden size \(64\)"),
}

HARMLESS = {
    "as saved": lambda _: None,
    "in shards": sharded(lambda _: None),
    "with a vision tower": also(vision_tower__layers__0__weight=4, multi_modal_projector__weight=4),
    "with a head for more tokens": also(mtp__layers__0__weight=4, model__mtp__fc__weight=4),
    "with buffers of old versions": also(
        model__layers__0__self_attn__rotary_emb__inv_freq=16, model__layers__0__self_attn__masked_bias=1
    ),
    "with a layer that predicts more tokens": lambda d: (
        also(model__layers__2__eh_proj__weight=4)(d),
        configured(num_nextn_predict_layers=1)(d),
    ),
    "with code that is not needed": configured(auto_map={"AutoConfig": "a.B"}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def changed(whole, tmp_path):
    def change(damage):
        directory = shutil.copytree(whole, tmp_path / "model")
        damage(directory)
        return directory

    return change


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_by_trainer_and_sampler_in_one_sentence_that_names_it(changed, damage):
    damage, named = DAMAGES[damage]
    directory = changed(damage)
    for load, kind in (
        (lambda: load_base_model(EngineOptions(str(directory), "tiny")), PacelineError),
        (lambda: check_model(directory), EngineUnfit),
    ):
        with pytest.raises(kind) as refused:
            load()
        message = str(refused.value)
        assert re.search(named, message)
        assert "\n" not in message


@pytest.mark.parametrize("change", HARMLESS)
def test_weights_that_no_part_of_the_language_model_uses_may_be_there(changed, change):
    directory = changed(HARMLESS[change])
    loaded = load_base_model(EngineOptions(str(directory), "tiny")).state_dict()
    assert len(check_model(directory)) == 15
    stored = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(weight, stored[name]) for name, weight in loaded.items())


def beside(name, *tensors):
    def add(directory):
        save_file({each: torch.zeros(1) for each in tensors}, directory / name)

    return add


def in_shards_too(directory):
    shutil.copy(directory / WEIGHTS, directory.parent / WEIGHTS)
    sharded(lambda _: None)(directory)
    shutil.copy(directory.parent / WEIGHTS, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (beside("old.safetensors", "model.norm.weight"), r"old.safetensors also holds model.norm.weight, .*; move old"),
        (in_shards_too, r"model-00001-of-.* also holds .*from model.safetensors; move .* elsewhere"),
    ],
    ids=["another file", "shards"],
)
def test_weights_that_only_vllm_would_read_are_refused_where_it_serves(changed, change, named):
    with pytest.raises(EngineUnfit, match=named):
        check_model(changed(change))


def test_files_of_other_weights_may_lie_beside_the_models(changed):
    directory = changed(beside("consolidated.safetensors", "layers.0.attention.wq.weight"))
    assert len(check_model(directory)) == 15


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "llama"])
def test_an_empty_window_is_refused_by_trainer_and_sampler_where_it_is_one(tmp_path, kind):
    directory = make_tiny(kind, tmp_path, sliding_window=0)
    named = "sliding_window is 0 in config.json; set null for no window"
    for load, error in (
        (lambda: PeftEngine(EngineOptions(str(directory), "tiny")), PacelineError),
        (lambda: check_model(directory), EngineUnfit),
    ):
        with pytest.raises(error, match=named) if kind == "mistral" else nullcontext():
            load()


def test_a_tied_head_need_not_be_stored(tmp_path):
    directory = make_tiny_llama(tmp_path, tied=True)
    assert "lm_head.weight" not in load_file(directory / WEIGHTS)
    load_base_model(EngineOptions(str(directory), "tiny"))
    check_model(directory)


def test_weights_that_are_not_finite_are_named(changed):
    def poison(directory):
        tensors = load_file(directory / WEIGHTS)
        tensors["model.embed_tokens.weight"][7] = torch.nan  # a token that no probe may draw
        save_file(tensors, directory / WEIGHTS)

    with pytest.raises(PacelineError, match=r"model.embed_tokens.weight holds NaN or infinity"):
        load_base_model(EngineOptions(str(changed(poison)), "tiny"))


async def test_the_engine_hf_starts_with_whole_models_alone(changed):
    directory = changed(DAMAGES["no up_proj"][0])
    with pytest.raises(EngineUnfit, match=r"model.layers.0.mlp.up_proj.weight is missing"):
        await HfEngine(SamplerOptions(directory, "tiny")).start()


async def test_weights_that_are_tied_and_differ_are_refused(changed):
    directory = changed(configured(tie_word_embeddings=True))
    named = "lm_head.weight differs from model.embed_tokens.weight .*set tie_word_embeddings to false"
    with pytest.raises(PacelineError, match=named):
        load_base_model(EngineOptions(str(directory), "tiny"))
    with pytest.raises(EngineUnfit, match=named):
        await HfEngine(SamplerOptions(directory, "tiny")).start()


def test_tied_weights_may_be_stored_twice(changed):
    def copied(directory):
        configured(tie_word_embeddings=True)(directory)
        tensors = load_file(directory / WEIGHTS)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, directory / WEIGHTS)

    load_base_model(EngineOptions(str(changed(copied)), "tiny"))


async def test_a_model_without_its_tokenizer_is_not_sampled_from(changed):
    directory = changed(lambda d: [file.unlink() for file in d.glob("token*")])
    with pytest.raises(EngineUnfit, match=r"its tokenizer cannot be read .*tokenizer.json"):
        await HfEngine(SamplerOptions(directory, "tiny")).start()


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3", "qwen3_5_text", "opt", "falcon"])
def test_architectures_whose_names_transformers_changes_are_whole(tmp_path, kind):
    directory = make_tiny(kind, tmp_path)
    load_base_model(EngineOptions(str(directory), "tiny"))
    check_model(directory)
