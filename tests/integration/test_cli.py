"""The command line against the real services: each command, with and without --json."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for
from typer.testing import CliRunner

import paceline
from paceline.cli.app import make_app

pytestmark = pytest.mark.services
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = make_tiny_llama(tmp_path_factory.mktemp("cli") / "model", context=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model):
    cluster = Cluster.make(tmp_path_factory.mktemp("cli") / "state", model, engine="vllm")
    with cluster.running():
        yield cluster


@pytest.fixture
def told(cluster, tmp_path, monkeypatch):
    """Run a command; return what it prints, parsed with --json. It must end with `status`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_ADDRESS", cluster.address)
    monkeypatch.setenv("PACELINE_API_KEY", cluster.api_key)

    def run(*arguments, status=0, given=None):
        result = CliRunner().invoke(make_app(), [str(argument) for argument in arguments], input=given)
        assert result.exit_code == status, result.output
        if status:
            return result.stderr
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    return run


@pytest.fixture
def training(service, request):
    """A run with the test's name, after one step."""
    training = service.create_lora_training_client(rank=4, user_metadata={"name": request.node.name[:60]})
    inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)}
    training.forward_backward([paceline.Datum(np.array([1, 2, 3]), inputs)], "cross_entropy")
    training.optim_step(paceline.AdamParams(learning_rate=1e-3)).result()
    yield training
    with suppress(paceline.errors.RunNotFound):  # the test has deleted it
        service.delete_run(training.run_id, delete_checkpoints=True)


@pytest.fixture
def name(training):
    return training.get_info().user_metadata["name"]


def test_runs_are_listed_and_shown_by_id_or_name(told, training, name):
    (run,) = [one for one in told("runs", "list", "--json") if one["run_id"] == training.run_id]
    assert (run["step"], run["user_metadata"]) == (1, {"name": name})
    assert run["volume_bytes"] > 0
    assert run["last_use_time"] >= run["create_time"]
    listed = told("runs", "list").splitlines()
    assert listed[0].split()[:3] == ["name", "id", "model"]
    assert any(line.startswith(name) and training.run_id in line for line in listed[1:])
    assert told("runs", "show", name, "--json") == told("runs", "show", training.run_id, "--json")
    assert "step            1\n" in told("runs", "show", name)


def test_a_run_that_does_not_exist_is_an_error_in_a_sentence(told):
    assert told("runs", "show", "nobody", status=1).startswith("no run has the name or id nobody; ")


def test_a_name_that_several_runs_have_is_refused_with_their_ids(told, service, training, name):
    other = service.create_lora_training_client(rank=4, user_metadata={"name": name})
    said = told("runs", "show", name, status=1)
    assert training.run_id in said
    assert other.run_id in said
    service.delete_run(other.run_id)


def test_a_run_is_renamed_and_tagged(told, training, name):
    assert told("runs", "rename", name, "better", "--json")["user_metadata"] == {"name": "better"}
    assert "better" in told("runs", "rename", "better", "better")
    tagged = told("runs", "tag", "better", "stage=2", "note=a=b", "--json")
    assert tagged["user_metadata"] == {"name": "better", "stage": "2", "note": "a=b"}
    assert "stage" not in told("runs", "tag", "better", "stage-")
    assert training.get_info().user_metadata == {"name": "better", "note": "a=b"}
    told("runs", "tag", "better", "stage", status=2)


def test_a_run_is_deleted_only_when_asked_and_answered(told, service, training, name):
    assert "nothing was deleted" in told("runs", "delete", name, given="n\n", status=1)
    assert told("runs", "delete", name, "--yes", "--json") == {"deleted": [training.run_id]}
    assert training.run_id not in [run.run_id for run in service.list_runs()]


def test_prune_deletes_idle_runs_and_lists_them_first(told, service, training):
    kept = told("runs", "prune", "--older-than", "1d", "--json")
    assert training.run_id not in kept["runs"]
    unnamed = service.create_lora_training_client(rank=4)
    wait_for(lambda: unnamed.run_id in told("runs", "prune", "--older-than", "1s", "--unnamed", "--dry-run"))
    assert unnamed.run_id in [run.run_id for run in service.list_runs()]
    pruned = told("runs", "prune", "--older-than", "1s", "--unnamed", "--yes", "--json")
    assert pruned["deleted"]
    assert unnamed.run_id in pruned["runs"]
    left = [run.run_id for run in service.list_runs()]
    assert training.run_id in left
    assert unnamed.run_id not in left


def test_checkpoints_are_saved_found_kept_and_deleted(told, service, training, name):
    made = told("checkpoints", "save", name, "first", "--ttl", "7d", "--json")
    assert (made["kind"], made["step"]) == ("state", 1)
    assert made["expire_time"]
    told("checkpoints", "save", name, "second")
    told("checkpoints", "save", name, "third", "--kind", "sampler")
    paths = [one["path"] for one in told("checkpoints", "list", name, "--json")]
    assert [path.rpartition("/")[2] for path in paths] == ["third", "second", "first"]
    assert [line.split()[0] for line in told("checkpoints", "list", name).splitlines()[1:]] == paths
    assert [one["name"] for one in told("checkpoints", "list", name, "--kind", "sampler", "--json")] == ["third"]
    assert {one["path"] for one in told("checkpoints", "search", name.upper(), "--json")} == set(paths)
    assert paths[0] in told("checkpoints", "search", "THIRD")
    assert told("checkpoints", "ttl", made["path"], "never", "--json")["expire_time"] is None
    assert "in 4 days" in told("checkpoints", "ttl", made["path"], "4d")
    kept = told("checkpoints", "keep-last", name, 1, "--yes", "--json")
    assert kept == {"deleted": [made["path"]]}
    told("checkpoints", "delete", paths[0], "--yes")
    assert [one.name for one in service.list_checkpoints(training.run_id)] == ["second"]
    assert "no such checkpoint" in told("checkpoints", "delete", paths[0], "--yes", status=1)


def test_a_checkpoint_is_downloaded_pushed_to_a_directory_merged_and_imported(told, training, name, model, tmp_path):
    made = told("checkpoints", "save", name, "mine", "--kind", "sampler", "--json")
    got = told("checkpoints", "download", made["path"], tmp_path / "got", "--json")
    assert got == {"path": made["path"], "directory": str(tmp_path / "got"), "size_bytes": made["size_bytes"]}
    told("checkpoints", "push", made["path"], tmp_path / "pushed")
    assert {file.name for file in (tmp_path / "pushed").iterdir()} == {
        file.name for file in (tmp_path / "got").iterdir()
    }
    assert "already exists" in told("checkpoints", "download", made["path"], tmp_path / "got", status=1)
    told("checkpoints", "merge", made["path"], tmp_path / "whole", "--model", model)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "whole").iterdir()
    }
    assert "llama.cpp" in told(
        "checkpoints", "merge", made["path"], tmp_path / "g", "--model", model, "--gguf", status=1
    )
    again = told("checkpoints", "import", tmp_path / "got", "--run", name, "--name", "theirs", "--json")
    assert (again["kind"], again["sha256"]) == ("sampler", made["sha256"])
    assert "theirs" in told("checkpoints", "import", tmp_path / "got", "--run", name, "--name", "theirs", "--overwrite")


def test_samples_are_printed_with_the_version_that_answered(told, training, name):
    version = training.publish_weights(wait_for="all").result().model.version
    options = ("--max-tokens", 4, "--seed", 7)
    alone = told("sample", "Country: Peru", "--model", name, *options)
    assert alone.strip()
    assert told("sample", "Country: Peru", "--model", f"{name}@{version}", *options) == alone
    lines = told("sample", "-", "--model", name, *options, given="Country: Peru")
    assert lines == alone
    assert told("sample", "x", "-n", 2, *options).count("[") >= 2
    assert "names no version" in told("sample", "x", "--model", f"{name}@x", status=1)


def test_samples_as_json_are_lines(cluster, told, training):
    result = CliRunner().invoke(make_app(), ["sample", "Country: Peru", "--max-tokens", "3", "--json"])
    pieces = [json.loads(line) for line in result.stdout.splitlines()]
    assert pieces[-1]["finish_reason"] in {"length", "stop"}
    assert {piece["model"]["run_id"] for piece in pieces} == {""}


def test_a_chat_answers_forgets_and_changes_its_weights(told, training, name):
    training.publish_weights(wait_for="all").result()
    typed = f"hi\n/reset\n/model {name}\nhello\n/model nobody\n/what\n/exit\nnever\n"
    result = CliRunner().invoke(make_app(), ["chat", "--max-tokens", "4"], input=typed)
    assert result.exit_code == 0, result.output
    for said in ("begun again", f"from {training.run_id}@1", "no run has the name or id nobody", "commands: /reset"):
        assert said in result.stderr
    result = CliRunner().invoke(make_app(), ["chat", "--max-tokens", "4", "--json"], input="hi\n")
    assert json.loads(result.stdout)["model"]["run_id"] == ""


def test_the_status_shows_services_models_versions_and_disk(told, training, name, cluster):
    version = training.publish_weights(wait_for="all").result().model.version
    status = told("status", "--json")
    assert [(one["kind"], one["reachable"], one["version"]) for one in status["services"]] == [
        (kind, True, paceline.__version__) for kind in ("gateway", "trainer", "sampler")
    ]
    assert all(one["memory_bytes"] > 0 and one["start_time"] for one in status["services"])
    assert [one["certificate"] for one in status["models"]] == ["packed"]
    (held,) = [one for one in status["versions"] if one["run_id"] == training.run_id]
    assert (held["version"], held["newest"], held["acknowledged"]) == (version, True, True)
    assert (status["queue"], status["trainer_error"]) == ([], "")
    assert 0 < status["disk"]["free_bytes"] < status["disk"]["total_bytes"]
    assert status["disk"]["used_bytes"] > 0
    shown = told("status")
    assert f"{cluster.address}, tenant default" in shown
    assert name in shown


def test_logs_of_the_services_are_printed(told, cluster, tmp_path):
    folder = tmp_path / ".paceline" / "logs"
    folder.mkdir(parents=True)
    (folder / "trainer.log").write_text("one\ntwo\nthree\n")
    assert told("logs", "trainer", "-n", 2) == "two\nthree\n"
    assert told("logs") == "trainer one\ntrainer two\ntrainer three\n"
    result = CliRunner().invoke(make_app(), ["logs", "trainer", "-n", "1", "--json"])
    assert json.loads(result.stdout) == {"service": "trainer", "line": "three"}
    assert "has no logs" in told("logs", "--state", tmp_path / "other", status=1)


def test_the_doctor_finds_the_services_well(told, model):
    checks = {one["name"]: one for one in told("doctor", "--model", model, "--json")}
    for good in ("Python", "model", "gateway", "API key", "clock", "services", "versions"):
        assert checks[good]["verdict"] == "ok", checks[good]
    assert all(one["verdict"] == "ok" or one["remedy"] for one in checks.values())
    assert "API key" in told("doctor")


def test_the_doctor_names_a_gateway_that_does_not_answer_and_a_key_that_is_wrong(told, cluster, tmp_path):
    (tmp_path / "wrong").write_text("another key than the right one")
    result = CliRunner().invoke(make_app(), ["doctor", "--api-key-file", "wrong", "--json"])
    assert result.exit_code == 1
    assert {one["name"]: one["verdict"] for one in json.loads(result.stdout)}["API key"] == "failed"


def test_the_key_of_the_services_of_this_directory_is_used_and_said(told, cluster, tmp_path, monkeypatch):
    monkeypatch.delenv("PACELINE_API_KEY")
    (tmp_path / ".paceline").mkdir()
    (tmp_path / ".paceline" / "api_key").write_text(cluster.api_key)
    result = CliRunner().invoke(make_app(), ["runs", "list"])
    assert result.exit_code == 0
    assert "using the API key of .paceline/api_key" in result.stderr
