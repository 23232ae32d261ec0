"""The identity of base weights: the same however they are split into files, and different for other weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.models.tiny_models import make_tiny_llama
from transformers import AutoModelForCausalLM

from paceline import errors
from paceline.base_model import base_weights
from paceline.base_model.base_weights import base_weights_sha256, check_same_base

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(0)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(directory, tensors=TENSORS, shards=None):
    """Write tensors into one file, or into shards that list their names, with an index."""
    directory.mkdir()
    if shards is None:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)
    for number, names in enumerate(shards):
        save_file({name: tensors[name] for name in names}, directory / f"model-{number}.safetensors")
    weight_map = {name: f"model-{number}.safetensors" for number, names in enumerate(shards) for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(directory)


def test_it_is_the_same_however_a_checkpoint_is_cut_into_files(tmp_path):
    whole = base_weights_sha256(write(tmp_path / "whole"))
    assert len(whole) == 64
    assert base_weights_sha256(write(tmp_path / "one each", shards=["c", "a", "b"])) == whole
    assert base_weights_sha256(write(tmp_path / "two", shards=["ac", "b"])) == whole


def test_it_is_the_same_for_shards_that_transformers_writes(tmp_path):
    model = make_tiny_llama(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert base_weights_sha256(str(tmp_path / "shards")) == base_weights_sha256(str(model))


@pytest.mark.parametrize(
    "other",
    [
        TENSORS | {"a": TENSORS["a"] + 1e-6},
        TENSORS | {"a": TENSORS["a"].reshape(4, 3)},
        TENSORS | {"b": TENSORS["b"].to(torch.float16)},
        {"x" if name == "a" else name: tensor for name, tensor in TENSORS.items()},
        {"a": TENSORS["a"]},
    ],
    ids=["a value", "a shape", "a dtype", "a name", "fewer"],
)
def test_other_weights_have_another(tmp_path, other):
    assert base_weights_sha256(write(tmp_path / "one")) != base_weights_sha256(write(tmp_path / "other", other))


def test_a_file_is_read_once_for_as_long_as_it_is_what_it_was(tmp_path, monkeypatch):
    directory = write(tmp_path / "model")
    first = base_weights_sha256(directory)

    def read_again(_):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(base_weights, "_hash_tensors", read_again)
        assert base_weights_sha256(directory) == first
    shutil.rmtree(directory)
    write(tmp_path / "model", TENSORS | {"a": TENSORS["a"] + 1})
    assert base_weights_sha256(directory) != first


def test_a_cache_that_cannot_be_used_costs_time_and_no_more(tmp_path):
    directory, cache = write(tmp_path / "model"), tmp_path / "cache" / "paceline" / "base-weights.json"
    first = base_weights_sha256(directory)
    cache.write_text("{")
    assert base_weights_sha256(directory) == first
    shutil.rmtree(cache.parent)
    cache.parent.write_text("a file where the cache was")
    assert base_weights_sha256(directory) == first


def test_a_model_without_safetensors_files_has_none_and_a_damaged_one_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert not base_weights_sha256(str(tmp_path / "empty"))
    directory = write(tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(errors.ChecksumMismatch):
        base_weights_sha256(directory)


def test_what_is_not_known_is_accepted_and_what_differs_is_named():
    check_same_base("", "b", "it has")
    check_same_base("a", "", "it has")
    check_same_base("a", "a", "it has")
    with pytest.raises(errors.BaseMismatch, match="it has base weights bb, but these are aa") as failure:
        check_same_base("aa", "bb", "it has")
    assert failure.value.metadata == {"theirs": "bb", "ours": "aa"}
