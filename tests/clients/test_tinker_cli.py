"""Tinker's command line, unmodified, against a running gateway. `make test-clients` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

pytestmark = pytest.mark.clients

MAKE_CHECKPOINTS = """
import json, tinker
training = tinker.ServiceClient().create_lora_training_client(base_model="model", rank=4).result()
print(json.dumps({
    "run": training.model_id,
    "state": training.save_state("one").result().path,
    "other": training.save_state("two").result().path,
    "sampler": training.save_weights_for_sampler("one").result().path,
    "external": training.save_weights_external("one").result().path,
}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"))
    with cluster.running():
        yield {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "TINKER_BASE_URL": f"http://{cluster.gateway.plan.environment['PACELINE_GATEWAY_HTTP_LISTEN']}",
            "TINKER_API_KEY": f"tml-{cluster.api_key}",
        }


@pytest.fixture(scope="module")
def paths(environment) -> dict[str, str]:
    return json.loads(run(environment, "-c", MAKE_CHECKPOINTS).splitlines()[-1])


def run(environment: dict[str, str], *arguments: str, code: int = 0) -> str:
    """Run Python with the SDK; return its output, or its error output if it should fail."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stderr if code else done.stdout


def tinker(environment: dict[str, str], *arguments: str, code: int = 0) -> str:
    return run(environment, "-m", "tinker.cli", "-f", "json", *arguments, code=code)


def listed(environment: dict[str, str], run_id: str) -> set[str]:
    answer = json.loads(tinker(environment, "checkpoint", "list", "--run-id", run_id))
    return {one["tinker_path"] for one in answer["checkpoints"]}


def test_models_and_runs_are_listed(environment, paths):
    assert "model" in tinker(environment, "model", "list")
    assert paths["run"] in tinker(environment, "run", "list")
    assert json.loads(tinker(environment, "run", "info", paths["run"]))["base_model"] == "model"


def test_checkpoints_are_listed_of_one_run_and_of_all(environment, paths):
    assert {paths["state"], paths["other"], paths["sampler"]} <= listed(environment, paths["run"])
    assert paths["state"] in tinker(environment, "checkpoint", "list")
    assert paths["state"] in tinker(environment, "checkpoint", "info", paths["state"])


def test_a_checkpoint_gets_an_expiration_and_loses_it(environment, paths):
    tinker(environment, "checkpoint", "set-ttl", paths["state"], "--ttl", "7200")
    tinker(environment, "checkpoint", "set-ttl", paths["state"], "--remove")


@pytest.mark.parametrize("kind", ["external", "state"])
def test_a_checkpoint_is_downloaded(environment, paths, tmp_path, kind):
    tinker(environment, "checkpoint", "download", paths[kind], "--output", str(tmp_path))
    [adapter] = tmp_path.rglob("adapter_model.safetensors")
    assert adapter.stat().st_size > 1000
    assert list(tmp_path.rglob("adapter_config.json"))


def test_a_checkpoint_is_deleted(environment, paths):
    tinker(environment, "checkpoint", "delete", "--yes", paths["other"])
    assert paths["other"] not in listed(environment, paths["run"])


def test_publishing_says_that_it_is_not_served(environment, paths):
    assert "not served here" in tinker(environment, "checkpoint", "publish", paths["state"], code=1)
