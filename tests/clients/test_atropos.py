"""`paceline atropos` with a real run-api and a real environment of atroposlib. `make test-clients` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.models.tiny_models import make_tiny_llama
from support.ports import free_port
from support.stacks.cluster import Cluster, wait_for

import paceline

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ENV = Path(__file__).with_name("atropos_env.py")


@pytest.fixture(scope="module")
def packages(client_packages):
    return client_packages("atropos")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("atropos")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"), engine="vllm")
    with cluster.running():
        yield cluster


@contextmanager
def process(log, command, **environment):
    """Run a program until the block ends."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    with log.open("ab") as output:
        running = subprocess.Popen(
            [str(part) for part in command],
            env={**kept, "HOME": str(log.parent), "OMP_NUM_THREADS": "1", **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def metrics(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_an_environment_learns_through_deaths_of_the_trainer_and_of_the_command(
    cluster, packages, tmp_path, temperature
):
    run_api = f"http://127.0.0.1:{free_port()}"
    http = cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
    name, steps = f"policy-{temperature.replace('.', '')}", 30
    command = [
        *(sys.executable, "-m", "paceline.cli", "atropos", "--atropos-url", run_api, "--run-name", name),
        *("--state", tmp_path / "state", "--log-dir", tmp_path, "--training-steps", steps, "--lr", "3e-2"),
        *("--lora-target-modules", "q_proj", "v_proj", "up_proj", "down_proj"),
        *(
            "--batch-size",
            8,
            "--gradient-accumulation-steps",
            2,
            "--lora-r",
            8,
            "--lora-alpha",
            16,
            "--lora-dropout",
            0,
        ),
        *("--seq-len", 64, "--benchmark", "--save-path", tmp_path / "trained"),
    ]
    own = {
        "PACELINE_ADDRESS": cluster.address,
        "PACELINE_API_KEY": cluster.api_key,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    theirs = {"PYTHONPATH": str(packages), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with ExitStack() as running:
        port = run_api.rpartition(":")[2]
        serve = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", port]
        running.enter_context(process(tmp_path / "api.log", serve, **theirs))
        log = tmp_path / "trainer.log"
        first = ExitStack()
        first.enter_context(process(log, command, **own))
        model = cluster.state.parent / "model"
        sample = [sys.executable, ENV, run_api, f"http://{http}/weights/{name}/v1", cluster.api_key, model, temperature]
        running.enter_context(process(tmp_path / "env.log", sample, **theirs))

        def explain():
            return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(tmp_path.glob("*.log")))

        wait_for(lambda: len(metrics(tmp_path)) >= 2, 120, explain)
        cluster.trainer.kill()
        cluster.trainer.start()
        wait_for(lambda: len(metrics(tmp_path)) >= 4, 120, explain)
        first.close()
        second = running.enter_context(process(log, command, **own))
        assert second.wait(240) == 0, explain()
    found = metrics(tmp_path)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    # Later batches may have been sampled from the previous version.
    assert found[0]["alignment/diff_abs_mean"] < 1e-4
    assert {"pos_logp", "neg_logp", "grad_norm", "loss", "time/sync"} <= found[0].keys()
    assert "benchmark: step" in log.read_text()
    assert (tmp_path / "trained" / "final" / "adapter_model.safetensors").exists()
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        run = next(run for run in service.list_runs() if run.user_metadata.get("name") == name)
        assert run.step == steps

        def score(**weights):
            sampling = service.create_sampling_client(**weights)
            params = paceline.SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
            sequences = sampling.sample(list(b"Country: Peru"), 32, params).result().sequences
            return sum((sequence.tokens >= 128).mean() for sequence in sequences) / 32

        assert score(run_id=run.run_id) > score(base_model="model") + 0.1
