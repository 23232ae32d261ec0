"""Headers of safetensors files are bounded before they are parsed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline import errors
from paceline.weights import read_header, read_tensor_entries
from paceline.weights.safetensors import MAX_HEADER_BYTES, MAX_TENSORS


def write(path, header: bytes):
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def empty_tensors(count, key="data_offsets"):
    entry = f'{{"dtype":"F32","shape":[0],"{key}":[0,0]}}'
    return ("{" + ",".join(f'"{index}":{entry}' for index in range(count)) + "}").encode()


def test_a_header_of_too_many_tensors_is_refused_before_it_is_parsed(tmp_path):
    file = write(tmp_path / "adapter", empty_tensors(MAX_TENSORS + 1))
    with pytest.raises(errors.InvalidShape, match=f"has {MAX_TENSORS + 1} tensors; at most {MAX_TENSORS}"):
        read_header(file)


def test_tensors_whose_keys_are_written_in_another_way_count_too(tmp_path):
    file = write(tmp_path / "adapter", empty_tensors(MAX_TENSORS + 1, "data\\u005foffsets"))
    with pytest.raises(errors.InvalidShape, match=f"at most {MAX_TENSORS}"):
        read_tensor_entries(file)


def test_a_header_that_is_too_long_is_not_read(tmp_path):
    file = tmp_path / "adapter"
    file.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(errors.ChecksumMismatch, match=f"header of {MAX_HEADER_BYTES + 1} bytes"):
        read_header(file)


def test_an_empty_tensor_is_refused(tmp_path):
    save_file({"a": np.ones((2, 2), np.float32), "b": np.ones((0, 2), np.float32)}, tmp_path / "adapter")
    with pytest.raises(errors.InvalidShape, match=r"has shape \[0, 2\]") as caught:
        read_tensor_entries(tmp_path / "adapter")
    assert caught.value.field == "b"


@pytest.mark.parametrize(
    "tensor",
    [
        {},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": 1, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]},
        [],
        None,
    ],
)
def test_an_entry_of_another_form_is_not_safetensors(tmp_path, tensor):
    with pytest.raises(errors.ChecksumMismatch, match="is not a safetensors file"):
        read_tensor_entries(write(tmp_path / "adapter", json.dumps({"a": tensor}).encode()))


def test_metadata_of_any_form_are_no_tensor(tmp_path):
    save_file({"a": np.ones((2, 2), np.float32)}, tmp_path / "adapter", {"format": "pt", "shape": "x"})
    assert [(entry.name, entry.size) for entry in read_tensor_entries(tmp_path / "adapter")] == [("a", 16)]
