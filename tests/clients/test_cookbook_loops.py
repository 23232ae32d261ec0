"""The two tinker-cookbook loops, unmodified, on the embedded model. `make test-clients` runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import make_model
import pytest
from support.stacks.cluster import Cluster, wait_for

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("cookbook_loop.py")
ALIAS = "Qwen/Qwen3-8B-Base"


@pytest.fixture(scope="module")
def model():
    return make_model.make_model(make_model.default_directory())


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    state = tmp_path_factory.mktemp("cookbook")
    settings = {"PACELINE_GATEWAY_HTTP_ALIASES": ALIAS, "PACELINE_SAMPLER_KV_CACHE_GIB": "2"}
    cluster = Cluster.make(state, model, engine="vllm", **settings)
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def packages(client_packages):
    return client_packages("clients")


class Loop:
    """A loop in a process of its own."""

    def __init__(self, cluster, packages, model, log_path, kind, steps):
        address = cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
        self._metrics = log_path / "metrics.jsonl"
        self.output = log_path.with_suffix(".log")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(log_path.parent),
            "PYTHONPATH": str(packages),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TINKER_BASE_URL": f"http://{address}",
            "TINKER_API_KEY": f"tml-{cluster.api_key}",
        }
        command = [sys.executable, str(SCRIPT), kind, str(log_path), ALIAS, str(model), str(steps)]
        with self.output.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def metrics(self):
        """Return the lines that it has logged."""
        found = []
        with suppress(FileNotFoundError, ValueError), self._metrics.open() as lines:  # its last line may be incomplete
            for line in lines:
                found.append(json.loads(line))  # noqa: PERF401
        return found

    def wait_for_step(self, step):
        def reached():
            assert self.process.poll() in (None, 0), self.output.read_text()[-4000:]
            return any("time_total" in line or "time/total" in line for line in self.metrics()[step:])

        wait_for(reached, 300, lambda: self.output.read_text()[-4000:])

    def finish(self):
        assert self.process.wait(600) == 0, self.output.read_text()[-4000:]


@pytest.mark.parametrize(("kind", "measure"), [("sl", "train_mean_nll"), ("rl", "reward/total")])
def test_a_loop_runs_to_its_end_through_deaths_of_the_trainer_and_of_itself(
    cluster, packages, model, tmp_path, kind, measure
):
    steps = 6
    loop = Loop(cluster, packages, model, tmp_path / kind, kind, steps)
    loop.wait_for_step(1)
    cluster.trainer.kill()
    cluster.trainer.start()
    loop.wait_for_step(2)
    loop.process.send_signal(signal.SIGKILL)
    loop.process.wait()
    again = Loop(cluster, packages, model, tmp_path / kind, kind, steps)
    again.finish()
    assert "Resuming from batch" in again.output.read_text()
    values = {line["step"]: line[measure] for line in again.metrics() if measure in line}
    assert sorted(values) == list(range(steps))
    if kind == "sl":
        assert values[steps - 1] < values[0]
