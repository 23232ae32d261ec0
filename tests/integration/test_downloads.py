"""Checkpoints are downloaded exactly as they are on the volume, or not at all."""

from __future__ import annotations

import hashlib
import re

import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

from paceline import errors

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("downloads")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"))
    with cluster.running():
        yield cluster


@pytest.fixture
def training(service):
    return service.create_lora_training_client(rank=2)


def _files(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def _on_volume(cluster, path):
    return cluster.state / "checkpoints" / "runs" / path.removeprefix("paceline://")


@pytest.mark.parametrize("save", ["save_state", "save_weights_for_sampler"])
def test_every_file_comes_as_it_is(cluster, service, training, tmp_path, save):
    path = getattr(training, save)("a").result().path
    directory = service.download_checkpoint(path, tmp_path / "new" / "a")
    assert _files(directory) == _files(_on_volume(cluster, path))


def test_what_is_there_is_not_overwritten(service, training, tmp_path):
    path = training.save_state("a").result().path
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="new directory"):
        service.download_checkpoint(path, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_cannot_be_made_is_named_as_it_was_given(service, training):
    path = training.save_state("a").result().path
    with pytest.raises(OSError, match=r"'/proc/new'$"):
        service.download_checkpoint(path, "/proc/new")


@pytest.mark.parametrize(
    ("save", "name"),
    [
        ("save_weights_for_sampler", "adapter_model.safetensors"),
        ("save_weights_for_sampler", "adapter_config.json"),
        ("save_state", "adapter_config.json"),
        ("save_state", "optimizer.safetensors"),
        ("save_state", "trainer_state.json"),
    ],
)
def test_a_damaged_file_is_named_and_leaves_nothing(cluster, service, training, tmp_path, save, name):
    path = getattr(training, save)("a").result().path
    file = _on_volume(cluster, path) / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(errors.ChecksumMismatch, match=re.escape(name)):
        service.download_checkpoint(path, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_the_checksums_list_must_come(cluster, service, training, tmp_path):
    path = training.save_state("a").result().path
    (_on_volume(cluster, path) / "optimizer.safetensors").unlink()
    with pytest.raises(errors.ChecksumMismatch, match=r"optimizer\.safetensors"):
        service.download_checkpoint(path, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_not_found(service, training, tmp_path):
    path = training.save_state("a").result().path
    with pytest.raises(errors.CheckpointNotFound):
        service.download_checkpoint(path.replace("/a", "/b"), tmp_path / "b")
    with pytest.raises(errors.InvalidPath):
        service.download_checkpoint("paceline://../state/a", tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
