"""Each minor release of Tinker's SDK from 0.24 on, unmodified, in its own folder. `make test-clients` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import compatibility_page
import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

pytestmark = pytest.mark.clients

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("tinker_calls.py")
RELEASES = (
    "0.24.1", "0.25.0", "0.26.2", "0.27.2", "0.28.1", "0.29.1", "0.30.4",
    "0.31.0", "0.32.0", "0.33.1", "0.34.0", "0.35.0", "0.36.0", "0.38.0",
)  # fmt: skip
OUTCOMES: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"))
    with cluster.running():
        yield cluster


def run_calls(cluster: Cluster, path: str = "") -> dict[str, str]:
    """Run every call with the SDK on `path`, or with the installed one; return the outcomes."""
    address = cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cluster.state),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "TINKER_BASE_URL": f"http://{address}",
        "TINKER_API_KEY": f"tml-{cluster.api_key}",
        "MODEL": "model",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    if path:
        assert answer["version"] == Path(path).name
    return answer["calls"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_call_works_or_is_refused_as_is_said(cluster, release):
    folder = ROOT / ".venv" / "clients" / "tinker" / release
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"tinker=={release}"], check=True)
    OUTCOMES[release] = run_calls(cluster, str(folder))
    assert {call: outcome for call, outcome in OUTCOMES[release].items() if outcome.startswith("fails")} == {}


def test_the_page_has_what_came_out():
    assert set(OUTCOMES) == set(RELEASES)
    table = compatibility_page.render(OUTCOMES)
    if os.environ.get("UPDATE"):
        compatibility_page.write(table)
    assert compatibility_page.read() == table
