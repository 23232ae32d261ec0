"""How the sampler checks an adapter's directory before an engine sees it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from paceline import weights
from paceline.errors import (
    ChecksumMismatch,
    InvalidArgument,
    InvalidDtype,
    InvalidShape,
    NonFinite,
    RankTooLarge,
)
from sampler_service.engine.model_files import check_adapter, read_adapter

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "lm_head"], "bias": "none"}
LINEAR = {"model.q_proj": (12, 8), "lm_head": (20, 8)}


def write(directory: Path, tensors: dict[str, tuple[int, ...]], **config: object) -> Path:
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, directory / "adapter_model.safetensors"
    )
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return directory


def pair(module: str, out: int = 12, inner: int = 8, rank: int = 2) -> dict[str, tuple[int, ...]]:
    prefix = f"base_model.model.{module}"
    return {f"{prefix}.lora_A.weight": (rank, inner), f"{prefix}.lora_B.weight": (out, rank)}


def test_reads_shapes_and_the_largest_rank(tmp_path):
    adapter = read_adapter(write(tmp_path, pair("model.q_proj", rank=3) | pair("lm_head", out=20)))
    assert adapter.modules == {"model.q_proj": ((3, 8), (12, 3)), "lm_head": ((2, 8), (20, 2))}
    assert adapter.rank == 3
    check_adapter(adapter, LINEAR, 4)


def test_the_rank_that_the_configuration_names_counts_too(tmp_path):
    adapter = read_adapter(write(tmp_path, pair("model.q_proj"), rank_pattern={"q_proj": 7}))
    with pytest.raises(RankTooLarge, match="7"):
        check_adapter(adapter, LINEAR, 4)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"base_model.model.lm_head.lora_A.weight": (2, 8)},
        pair("lm_head") | {"base_model.model.lm_head.base_layer.weight": (20, 8)},
        {"base_model.model.embed.lora_embedding_A": (2, 8), "base_model.model.embed.lora_embedding_B": (8, 2)},
        {name.removeprefix("base_model."): shape for name, shape in pair("lm_head").items()},
        dict.fromkeys(pair("lm_head"), ()),
    ],
    ids=["empty", "half", "base weights", "embedding", "other prefix", "no matrix"],
)
def test_tensors_that_no_engine_would_apply_are_refused(tmp_path, tensors):
    with pytest.raises(InvalidShape):
        read_adapter(write(tmp_path, tensors))


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "LOHA"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"lora_bias": True},
        {"layer_replication": [[0, 1], [0, 1]]},
        {"init_lora_weights": "pissa_niter_4"},
    ],
    ids=str,
)
def test_adapters_other_than_plain_lora_are_refused(tmp_path, config):
    with pytest.raises(InvalidArgument):
        read_adapter(write(tmp_path, pair("lm_head", out=20), **config))


@pytest.mark.parametrize(
    "tensors",
    [pair("model.other"), pair("model.q_proj", inner=7), pair("model.q_proj", out=11)],
    ids=["unknown module", "other input", "other output"],
)
def test_adapters_of_another_model_are_refused(tmp_path, tensors):
    with pytest.raises(InvalidShape):
        check_adapter(read_adapter(write(tmp_path, tensors)), LINEAR, 4)


def _write_raw(directory: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    return directory


def _entry(shape: object, start: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"no json",
        b"[]",
        b"[" * 100_000,
        {"a": 1},
        {"a": {}},
        {"a": _entry([1], None, 4)},
        {"a": _entry(["1"], 0, 4)},
        {"a": _entry(1, 0, 4)},
        {"a": _entry([1], 0, 4), "b": _entry([1], 8, 12)},
        {"a": _entry([1], 0, 8)},
        {"a": _entry([4], 0, 4)},
        {"a": _entry([2], 0, 4)},
        {"a": _entry([-1], 0, 4)},
        {"a": _entry([1], 0, 4, "I32")},
        {"a": _entry([1], 0, 4, [])},
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_file_that_is_not_what_its_header_says_is_refused_by_a_typed_error(tmp_path, header):
    directory = _write_raw(tmp_path, header, bytes(4))
    for read in (read_adapter, lambda path: weights.read_tensor_entries(path / "adapter_model.safetensors")):
        with pytest.raises((ChecksumMismatch, InvalidShape, InvalidDtype)) as failure:
            read(directory)
        assert failure.value.field


def test_a_configuration_that_is_none_is_refused_by_the_name_of_its_field(tmp_path):
    directory = write(tmp_path, pair("model.q_proj"), r="two")
    with pytest.raises(InvalidArgument, match=r"^adapter_config\.r: is not a whole number .*; save the adapter"):
        read_adapter(directory)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_no_numbers_are_refused_by_their_name(tmp_path, value, dtype):
    tensors = {name: np.full((300, 1000), np.finfo(dtype).max, dtype) for name in "abc"}
    tensors["d"] = np.ones(3, np.float32)
    file = tmp_path / "weights"
    save_file(tensors, file)
    weights.check_finite(file)
    tensors["b"][299, 999] = value
    save_file(tensors, file)
    with pytest.raises(NonFinite) as failure:
        weights.check_finite(file)
    assert failure.value.field == "b"


def test_bfloat16_weights_that_are_no_numbers_are_refused(tmp_path):
    tensors = {name: torch.full((5, 7), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16) for name in "ab"}
    file = tmp_path / "weights"
    save_torch_file(tensors, file)
    weights.check_finite(file)
    tensors["a"][4, 6] = float("-inf")
    save_torch_file(tensors, file)
    with pytest.raises(NonFinite) as failure:
        weights.check_finite(file)
    assert failure.value.field == "a"
