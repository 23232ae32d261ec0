"""Adapters made elsewhere become checkpoints of a run, or are refused with nothing left behind."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline import errors
from paceline.layout import RUN_FILE, CheckpointPath, Volume, new_run_id
from paceline.rpc.identity import Identity
from paceline.types import CheckpointKind, LoraConfig
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.import_adapter import import_adapter, main

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
FILES = {"adapter_model.safetensors", "adapter_config.json", "manifest.json"}


@pytest.fixture
def volume(tmp_path):
    return Volume(tmp_path / "volume")


@pytest.fixture
def run_id(volume):
    run_id = new_run_id()
    volume.run(run_id).mkdir(parents=True)
    parameters = asdict(LoraConfig(rank=4, alpha=8))
    facts = {"format": 1, "run_id": run_id, "tenant": "team", "base_model": "tiny", "lora": parameters}
    (volume.run(run_id) / RUN_FILE).write_text(json.dumps(facts))
    return run_id


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "made"
    directory.mkdir()
    save_file({"a": np.ones((4, 2), np.float32)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    (directory / "training_args.bin").write_bytes(b"a pickle")
    return directory


async def test_the_checkpoint_holds_the_adapter_alone_and_is_its_tenants(volume, run_id, source):
    made = await import_adapter(source, volume, run_id, "made")
    path = CheckpointPath(run_id, CheckpointKind.SAMPLER, "made")
    assert (made.path, made.step) == (str(path), 0)
    directory = CheckpointStore(volume).find(path, Identity("team"))
    assert {file.name for file in directory.iterdir()} == FILES
    weights = "adapter_model.safetensors"
    assert (directory / weights).read_bytes() == (source / weights).read_bytes()
    with pytest.raises(errors.CheckpointNotFound):
        CheckpointStore(volume).find(path, Identity("stranger"))


async def test_a_name_that_is_taken_is_replaced_only_if_asked(volume, run_id, source):
    first = await import_adapter(source, volume, run_id, "made")
    save_file({"a": np.zeros((4, 2), np.float32)}, source / "adapter_model.safetensors")
    with pytest.raises(errors.CheckpointExists):
        await import_adapter(source, volume, run_id, "made")
    assert (await import_adapter(source, volume, run_id, "made", overwrite=True)).sha256 != first.sha256


def move_and_link(path):
    moved = path.rename(path.with_name(f"moved-{path.name}"))
    path.symlink_to(moved)


MISFITS = {
    "no weights": lambda d: (d / "adapter_model.safetensors").unlink(),
    "no configuration": lambda d: (d / "adapter_config.json").unlink(),
    "not safetensors": lambda d: (d / "adapter_model.safetensors").write_bytes(b"x" * 100),
    "too short": lambda d: (d / "adapter_model.safetensors").write_bytes(b"x"),
    "not JSON": lambda d: (d / "adapter_config.json").write_text("["),
    "no settings": lambda d: (d / "adapter_config.json").write_text("[]"),
    "other rank": lambda d: (d / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": 8})),
    "no rank": lambda d: (d / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": None})),
    "a link for the weights": lambda d: move_and_link(d / "adapter_model.safetensors"),
    "a link for the configuration": lambda d: move_and_link(d / "adapter_config.json"),
    "an empty tensor": lambda d: save_file(
        {"a": np.ones((4, 2), np.float32), "b": np.ones((0, 2), np.float32)}, d / "adapter_model.safetensors"
    ),
    "other alpha": lambda d: (d / "adapter_config.json").write_text(json.dumps(CONFIG | {"lora_alpha": 4})),
}


@pytest.mark.parametrize("misfit", MISFITS)
async def test_what_does_not_fit_is_refused_and_leaves_nothing(volume, run_id, source, misfit):
    MISFITS[misfit](source)
    with pytest.raises(
        (errors.CheckpointMismatch, errors.ChecksumMismatch, errors.InvalidArgument, errors.InvalidShape)
    ):
        await import_adapter(source, volume, run_id, "made")
    assert {path.name for path in volume.run(run_id).iterdir()} == {RUN_FILE}


@pytest.mark.parametrize(
    ("run", "name", "text"),
    [("run-" + "0" * 32, "made", "no such run"), ("../x", "made", "no such run"), (None, "../x", "1 to 128")],
)
def test_the_command_says_what_is_wrong(volume, run_id, source, run, name, text):
    arguments = [str(source), "--checkpoint-dir", str(volume.root), "--run", run or run_id, "--name", name]
    with pytest.raises(SystemExit, match=text):
        main(arguments)


def test_the_command_makes_private_files_whatever_the_umask_is(volume, run_id, source):
    before = os.umask(0o022)
    try:
        main([str(source), "--checkpoint-dir", str(volume.root), "--run", run_id, "--name", "made"])
    finally:
        os.umask(before)
    made = CheckpointStore(volume).find(CheckpointPath(run_id, CheckpointKind.SAMPLER, "made"), Identity("team"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {0o600}
