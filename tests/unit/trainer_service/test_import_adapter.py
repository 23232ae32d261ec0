"""Adapters made elsewhere become checkpoints of a run, or are refused with nothing left behind."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline import errors
from paceline.layout import RUN_FILE, CheckpointPath, Volume, new_run_id
from paceline.rpc.identity import Identity
from paceline.types import CheckpointKind, LoraConfig
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.import_adapter import import_adapter, main
from trainer_service.volume_files import write_checked

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
    content = {"run_id": run_id, "tenant": "team", "base_model": "tiny", "user_metadata": {}, "lora": parameters}
    write_checked(volume.run(run_id) / RUN_FILE, content)
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


async def test_the_base_weights_that_peft_saves_beside_an_adapter_on_the_head_are_left_out(volume, run_id, source):
    own = {"base_model.model.lm_head.lora_A.weight": np.arange(12, dtype=np.float32).reshape(4, 3)}
    base = {"base_model.model.lm_head.base_layer.weight": np.ones((5, 3), np.float16)}
    save_file(base | own, source / "adapter_model.safetensors", {"format": "pt"})
    await import_adapter(source, volume, run_id, "made")
    directory = CheckpointStore(volume).find(CheckpointPath(run_id, CheckpointKind.SAMPLER, "made"), Identity("team"))
    kept = load_file(directory / "adapter_model.safetensors")
    assert kept.keys() == own.keys()
    for name, value in own.items():
        np.testing.assert_array_equal(kept[name], value)


WITHOUT_EFFECT = {
    "alphas that are the adapter's": {"alpha_pattern": {"q_proj": 8}},
    "ranks that are the adapter's": {"rank_pattern": {"q_proj": 4}},
    "no patterns": {"alpha_pattern": {}, "rank_pattern": None},
}


@pytest.mark.parametrize("setting", WITHOUT_EFFECT)
async def test_a_setting_without_effect_is_no_obstacle(volume, run_id, source, setting):
    (source / "adapter_config.json").write_text(json.dumps(CONFIG | WITHOUT_EFFECT[setting]))
    assert (await import_adapter(source, volume, run_id, "made")).step == 0


WITH_HELP = {
    "another alpha": (CONFIG | {"alpha_pattern": {"q_proj": 4}}, r"alpha_pattern gives modules .* scaling B"),
    "another rank": (CONFIG | {"rank_pattern": {"q_proj": 8}}, r"rank_pattern gives modules .* one rank"),
    "no kind": ({**CONFIG, "peft_type": None}, r"adapter_config.json names no peft_type; only LORA is loaded"),
    "another kind": ({**CONFIG, "peft_type": "IA3"}, r"has peft_type IA3; only LORA is loaded: save"),
}


@pytest.mark.parametrize("setting", WITH_HELP)
async def test_a_setting_with_effect_is_refused_with_what_to_do(volume, run_id, source, setting):
    config, message = WITH_HELP[setting]
    (source / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(errors.CheckpointMismatch, match=message):
        await import_adapter(source, volume, run_id, "made")


async def test_pickles_and_whole_models_are_no_adapters_and_the_refusal_says_so(volume, run_id, source):
    (source / "adapter_model.safetensors").rename(source / "model.safetensors")
    with pytest.raises(errors.CheckpointMismatch, match="whole model"):
        await import_adapter(source, volume, run_id, "made")
    (source / "model.safetensors").rename(source / "adapter_model.bin")
    with pytest.raises(errors.CheckpointMismatch, match="pickled"):
        await import_adapter(source, volume, run_id, "made")


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
