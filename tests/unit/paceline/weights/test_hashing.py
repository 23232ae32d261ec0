"""Hashes do not depend on how a file is read, and lists of them show what changed."""

import hashlib
import json
import shutil
import subprocess

import google_crc32c
import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from paceline import weights
from paceline.errors import ChecksumMismatch
from paceline.files.regular_files import NotRegularFile
from paceline.layout import CONFIG_FILE, MODEL_FILE
from paceline.types import ServedModel
from paceline.weights.hashing import Blake3, checksums_of, spare_threads

EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
MODEL = ServedModel("tiny", "run-" + "0" * 32, 1)


@pytest.fixture(params=["1", "4", "64"])
def cores(request, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", request.param)
    return int(request.param)


@pytest.fixture
def model(tmp_path):
    """A directory with a whole model's files."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": np.ones((4, 2), np.float32)}, directory / MODEL_FILE)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 2}))
    return directory


@pytest.mark.parametrize("size", [0, 1, 1 << 18, (3 << 20) + 5])
def test_a_file_has_the_same_checksums_however_many_threads_read_it(tmp_path, cores, size):
    data = np.random.default_rng(size).bytes(size)
    file = tmp_path / "file"
    file.write_bytes(data)
    expected = blake3(data).hexdigest(), google_crc32c.value(data), hashlib.sha256(data).hexdigest()
    made = checksums_of(file, with_sha256=True)
    assert (made.blake3, made.crc32c, made.sha256) == expected
    assert (weights.blake3_of(file), weights.crc32c_of(file), weights.sha256_of(file)) == expected
    assert checksums_of(file).sha256 == ""


def test_pieces_of_any_length_hash_as_the_whole(cores):
    data = memoryview(np.random.default_rng(0).bytes(5 << 20))
    for step in (1 << 20, 777_777):
        hashed = Blake3()
        for start in range(0, len(data), step):
            hashed.update(data[start : start + step])
        assert hashed.hexdigest() == blake3(data).hexdigest()
    assert Blake3().hexdigest() == EMPTY


@pytest.mark.parametrize(("told", "threads"), [("1", 1), ("2", 1), ("4", 2), ("16", 8), ("128", 8)])
def test_threads_hash_only_on_cores_that_others_leave(monkeypatch, told, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert spare_threads() == threads


def test_the_cores_of_a_process_without_a_share_are_those_that_it_may_use(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert spare_threads() == 3


def test_links_are_not_hashed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(NotRegularFile):
        weights.blake3_of(tmp_path / "link")


@pytest.mark.parametrize(("is_saved", "sums"), [(True, weights.Sums.SHA256), (False, weights.Sums.BLAKE3)])
def test_a_whole_model_lists_the_hashes_of_its_kind(model, is_saved, sums):
    manifest = weights.describe_weights(model, MODEL, tenant="team", step=0, is_saved=is_saved)
    weights.write_manifest(model, manifest)
    weights.write_sums(model, manifest, sums)
    data = (model / MODEL_FILE).read_bytes()
    assert manifest.model.blake3 == blake3(data).hexdigest()
    assert manifest.sha256 == (hashlib.sha256(data).hexdigest() if is_saved else "")
    assert weights.verify_model(model, manifest) == manifest.model.blake3
    if is_saved:
        subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=model, check=True, capture_output=True)
    for name in ("config.json", MODEL_FILE):
        damaged = shutil.copytree(model, model.with_name(f"{name}-damaged"))
        (damaged / name).write_bytes((damaged / name).read_bytes()[:-1] + b"!")
        with pytest.raises(ChecksumMismatch, match=name):
            weights.verify_model(damaged, manifest)
    (model / CONFIG_FILE).write_text("{}")
    with pytest.raises(ChecksumMismatch, match="files that were saved"):
        weights.verify_model(model, manifest)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_model_whose_list_was_exchanged_with_its_files_differs_from_its_manifest(model, is_saved):
    manifest = weights.describe_weights(model, MODEL, tenant="team", step=0, is_saved=is_saved)
    save_file({"a": np.zeros((4, 2), np.float32)}, model / MODEL_FILE)
    weights.write_sums(model, None, weights.Sums.of(manifest))
    with pytest.raises(ChecksumMismatch, match="differs from its manifest"):
        weights.verify_model(model, manifest)
