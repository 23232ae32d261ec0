"""What `paceline up` plans and refuses before it starts anything."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.ports import free_service_ports

from paceline.cli import main
from paceline.files.api_keys import hash_token, read_keys
from paceline.files.key_changes import add_key
from paceline.machine import visible_gpus
from paceline.up import run as module
from paceline.up.plan import (
    CannotStart,
    Plan,
    UpOptions,
    locked_state,
    make_plans,
    read_or_make_key,
    share_cores,
    share_gpus,
)
from paceline.up.run import up
from trainer_service.settings import TrainerSettings


def make_model_files(directory):
    """Make the files of a model that are checked before a start."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(4, np.float32)}, directory / "model.safetensors")


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Return options that pass all checks; the start itself would then fail with another error."""
    make_model_files(tmp_path / "model")
    monkeypatch.setattr(module, "Supervisor", None)
    address = f"127.0.0.1:{free_service_ports()}"
    return UpOptions(str(tmp_path / "model"), state=str(tmp_path / "state"), address=address)


def refusal(options: UpOptions) -> str:
    with pytest.raises(CannotStart) as refused:
        up(options)
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": "nonsense"}, ["--address nonsense", "host:port"]),
        ({"address": "127.0.0.1:65500"}, ["--address 127.0.0.1:65500", "65432"]),
        ({"address": "192.0.2.1:50050"}, ["192.0.2.1:50051", "--address"]),
        ({"log_level": "loud"}, ["PACELINE_TRAINER_LOG_LEVEL", "'DEBUG'"]),
        ({"model": "/no/such/model"}, ["--model /no/such/model", "no directory"]),
        ({"model": "./no-such-model"}, ["--model ./no-such-model", "no directory"]),
        ({"model": "/"}, ["--model /", "config.json"]),
    ],
)
def test_what_cannot_be_started_is_refused_in_a_sentence_that_names_it(options, change, words):
    message = refusal(replace(options, **change))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("offset", [0, 1, 2, 100, 101, 102])
def test_a_port_that_is_taken_is_named_and_no_file_is_changed_for_it(options, offset):
    host, _, port = options.address.rpartition(":")
    with socket.create_server((host, int(port) + offset)):
        assert f"{host}:{int(port) + offset}" in refusal(options)
    assert not (Path(options.state) / "logs").exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PACELINE_TRAINER_RANK": "2"}, ["PACELINE_TRAINER_RANK"]),
        ({"PACELINE_TRANIER_RANKS": "2"}, ["PACELINE_TRANIER_RANKS"]),
        ({"PACELINE_SAMPLER_KV_CACHE_GIB": "much"}, ["PACELINE_SAMPLER_KV_CACHE_GIB", "much"]),
        ({"PACELINE_GATEWAY_LISTEN": "127.0.0.1:1"}, ["PACELINE_GATEWAY_LISTEN", "--address"]),
        ({"PACELINE_SAMPLER_INSECURE": "true"}, ["PACELINE_SAMPLER_INSECURE", "--state"]),
    ],
)
def test_variables_that_no_service_knows_or_that_would_part_them_are_refused(options, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = refusal(options)
    assert all(word in message for word in words), message


def environments(given: dict[str, str], tmp_path: Path, **changes: str) -> dict[str, Plan]:
    return {plan.name: plan.environment for plan in make_plans(UpOptions("tiny", **changes), tmp_path, given)}


def test_variables_go_to_their_services_and_win(tmp_path):
    given = {"PACELINE_SAMPLER_MAX_LORA_RANK": "8", "PACELINE_TRAINER_PACK_TOKENS": "64", "PACELINE_API_KEY": "secret"}
    planned = environments(given, tmp_path)
    assert planned["sampler"]["PACELINE_SAMPLER_MAX_LORA_RANK"] == "8"
    assert planned["trainer"]["PACELINE_TRAINER_MAX_LORA_RANK"] == "64"
    assert planned["trainer"]["PACELINE_TRAINER_PACK_TOKENS"] == "64"
    assert not any("secret" in environment.values() for environment in planned.values())


def test_a_service_may_take_20_seconds_longer_to_stop_than_its_calls_may_take_to_finish(tmp_path):
    given = {"PACELINE_TRAINER_DRAIN_SECONDS": "60", "PACELINE_SAMPLER_DRAIN_SECONDS": "long"}
    plans = make_plans(UpOptions("tiny"), tmp_path, given)
    assert {plan.name: plan.stop_seconds for plan in plans} == {"trainer": 80.0, "sampler": 25.0, "gateway": 25.0}


def test_the_largest_rank_is_that_of_services_started_by_hand():
    assert UpOptions("tiny").max_lora_rank == TrainerSettings.model_fields["max_lora_rank"].default


def test_a_home_directory_in_the_models_path_is_found_by_all_services(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer, sampler, gateway = make_plans(UpOptions("~/model"), tmp_path / "state", {})
    paths = {
        trainer.environment["PACELINE_TRAINER_MODEL"],
        sampler.environment["PACELINE_SAMPLER_MODEL"],
        gateway.environment["PACELINE_GATEWAY_HTTP_TOKENIZER"],
    }
    assert paths == {str(tmp_path / "model")}


def test_the_help_says_that_a_model_is_required(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["up", "--help"]) == 0
    told = {line.split()[1].strip("-"): line for line in capsys.readouterr().out.splitlines() if "--" in line}
    assert "[required]" in told["*"]
    assert f"[default: {UpOptions('tiny').max_lora_rank}]" in told["max-lora-rank"]


@pytest.mark.parametrize(
    "given", [["up", "--model", "absent", "--engin", "hf"], ["atropos", "--run-nam", "policy"]], ids=["up", "atropos"]
)
def test_an_option_cut_short_is_refused_by_name(given, capsys, monkeypatch):
    monkeypatch.setenv("PACELINE_ADDRESS", "refused")  # so that nothing would be called
    assert main(given) == 2
    assert f"No such option: {given[-2]}" in capsys.readouterr().err


def test_both_services_compute_in_float32_on_a_cpu(tmp_path):
    planned = environments({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert planned["trainer"]["PACELINE_TRAINER_DTYPE"] == "float32"
    assert planned["sampler"]["PACELINE_SAMPLER_DTYPE"] == "float32"


def test_both_services_compute_in_one_half_precision_dtype_on_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.up.plan.visible_gpus", lambda _: ("0", "1"))
    planned = environments({}, tmp_path)
    assert planned["trainer"]["PACELINE_TRAINER_DTYPE"] == "bfloat16"
    assert planned["sampler"]["PACELINE_SAMPLER_DTYPE"] == "bfloat16"


@pytest.mark.parametrize(
    ("gpus", "changes", "after"),
    [
        (("0",), {}, "sampler"),
        (("0",), {"engine": "hf"}, ""),
        (("0",), {"bridge": "shared"}, ""),
        (("0", "1"), {}, ""),
        ((), {}, ""),
    ],
)
def test_on_one_gpu_the_trainer_starts_when_vllm_has_measured_the_free_memory(
    tmp_path, monkeypatch, gpus, changes, after
):
    monkeypatch.setattr("paceline.up.plan.visible_gpus", lambda _: gpus)
    plans = make_plans(UpOptions("tiny", **changes), tmp_path, {})
    assert {plan.name: plan.after for plan in plans} == {"trainer": after, "sampler": "", "gateway": ""}


def test_everything_that_is_kept_lies_in_the_state_directory(tmp_path):
    planned = environments({}, tmp_path)
    for name in ("TRAINER", "SAMPLER"):
        environment = planned[name.lower()]
        assert environment[f"PACELINE_{name}_CHECKPOINT_DIR"] == str(tmp_path / "checkpoints")
        assert environment[f"PACELINE_{name}_SCRATCH_DIR"] == str(tmp_path / "scratch")


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, ("0", "1", "2")),
        ("2,1", ("2", "1")),
        ("1,7,0", ("1",)),
        ("GPU-8a56, 0", ("GPU-8a56", "0")),
        ("", ()),
        ("-1", ()),
    ],
)
def test_gpus_are_those_that_cuda_would_see(tmp_path, variable, seen):
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}, tmp_path) == seen


def test_there_are_no_gpus_without_a_driver(tmp_path):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("gpus", "ranks", "parallel", "together", "expected"),
    [
        (["4", "5"], 1, 1, False, ("4", "5")),
        (list("01234567"), 1, 1, False, ("0", "1")),
        (list("01234567"), 4, 2, False, ("0,1,2,3", "4,5")),
        (["4"], 1, 1, False, ("4", "4")),
        (["4", "5"], 1, 1, True, ("4", "4")),
    ],
)
def test_gpus_are_shared_out_by_their_own_names(gpus, ranks, parallel, together, expected):
    shares = share_gpus(gpus, ranks, parallel, together=together)
    assert tuple(share.environment["CUDA_VISIBLE_DEVICES"] for share in shares) == expected
    is_halved = "PACELINE_SAMPLER_GPU_MEMORY_UTILIZATION" in shares[1].environment
    assert is_halved == (expected[0] == expected[1])


def test_fewer_gpus_than_are_asked_for_are_refused():
    with pytest.raises(CannotStart, match=r"4 GPUs.* there are 2: 0, 1"):
        share_gpus(["0", "1"], 4, 1, together=False)


def test_gpus_that_nobody_has_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.up.plan.visible_gpus", lambda _: ("0", "1", "2", "3"))
    monkeypatch.setattr(module, "visible_gpus", lambda _: ("0", "1", "2", "3"))
    said = module._describe_shares(make_plans(UpOptions("tiny"), tmp_path, {}), {})
    assert said.startswith("starting trainer: GPU 0, sampler: GPU 1; idle: GPU 2, 3 (PACELINE_TRAINER_RANKS")


@pytest.mark.parametrize(
    ("cores", "expected"), [([3], ({3}, {3})), ([0, 1], ({0}, {1})), ([0, 1, 2, 3, 4], ({0, 1}, {2, 3, 4}))]
)
def test_cores_are_shared_out_without_overlap(cores, expected):
    shares = share_cores(cores)
    assert tuple(share.cores for share in shares) == expected
    assert [share.environment["OMP_NUM_THREADS"] for share in shares] == [str(len(cores)) for cores in expected]


def _without_weights(model):
    (model / "model.safetensors").unlink()


def _truncated(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _not_safetensors(model):
    (model / "model.safetensors").write_text("<html>not found</html>")


def _without_a_shard(model):
    index = {"weight_map": {"w": "model.safetensors", "x": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _without_a_tokenizer(model):
    (model / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_without_weights, r"model has no \*\.safetensors"),
        (_truncated, r"model/model\.safetensors is not a complete safetensors file; download or copy it again"),
        (_not_safetensors, r"model/model\.safetensors is not a complete safetensors file"),
        (_without_a_shard, r"model/model-2\.safetensors is missing, but the index of its weights names it"),
        (_without_a_tokenizer, r"model has no tokenizer \(tokenizer\.json or "),
    ],
)
def test_a_model_that_is_not_whole_is_refused_by_its_file_before_anything_starts(options, damage, told):
    damage(Path(options.model))
    with pytest.raises(CannotStart, match=told):
        up(options)


def test_keys_that_others_added_are_there_after_the_next_start(tmp_path):
    key_file = read_or_make_key(tmp_path)
    added = add_key(tmp_path / "keys.json", "team", "team-key")
    assert read_or_make_key(tmp_path) == key_file
    keys = read_keys(tmp_path / "keys.json")
    assert {(key.name, key.tenant) for key in keys} == {("up", "default"), ("team-key", "team")}
    assert {key.sha256 for key in keys} == {hash_token(added), hash_token(key_file.read_text().strip())}


def test_a_state_that_cannot_be_kept_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    told = r"--state .*file cannot be created \(File exists\); choose another directory"
    with pytest.raises(CannotStart, match=told), locked_state(tmp_path / "file"):
        pass
    (tmp_path / "keys.json").write_text("torn")
    with pytest.raises(CannotStart, match=r"keys\.json is not a valid keys file"):
        read_or_make_key(tmp_path)


def test_a_second_one_on_the_same_state_is_refused_before_it_touches_anything(options, tmp_path):
    state = tmp_path / "state"
    with locked_state(state), pytest.raises(CannotStart, match=r"is used by another `paceline up` \(.*; stop that one"):
        up(replace(options, state=str(state)))
    assert [path.name for path in state.iterdir()] == [".lock"]
    with locked_state(state):  # the first process has ended
        pass
