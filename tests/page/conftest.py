"""A deployment with a few runs, and a browser."""

from __future__ import annotations

import pytest
from loops import HOSTILE, STEPS, Loop
from support.models.tiny_models import CHAT_TEMPLATE, make_tiny_llama
from support.stacks.cluster import Cluster

import paceline
from paceline import Rollout


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    model = make_tiny_llama(folder / "model", context=1024)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "state").mkdir()
    cluster = Cluster.make(folder / "state", model, engine="vllm")
    with cluster.running():
        yield cluster


@pytest.fixture(scope="session")
def client(cluster):
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        yield service


@pytest.fixture(scope="session")
def loops(client):
    """Three runs, the first by its name a trap; the last one goes on when a test says so."""
    hostile = Loop(client, HOSTILE, 1e-3, seed=3)
    hostile.training.log({"a/b:c@d -e": 1.0}).result()
    hostile.training.log_rollouts([Rollout(HOSTILE, HOSTILE, 1.0, env=HOSTILE)]).result()
    slow, fast = Loop(client, "arithmetic, lr 1e-3", 1e-3, seed=1), Loop(client, "arithmetic, lr 4e-3", 4e-3, seed=2)
    for _ in range(STEPS):
        slow.take()
        fast.take()
    return {"hostile": hostile, "slow": slow, "fast": fast}


@pytest.fixture(scope="session")
def browser():
    from browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def address(cluster):
    return f"http://{cluster.gateway.plan.environment['PACELINE_GATEWAY_HTTP_LISTEN']}"


@pytest.fixture
def tab(browser, address):
    """Return a function that opens a tab; each is checked when the test ends."""
    from browser import WIDE, Watched

    opened = []

    def open_tab(viewport=WIDE, **options):
        opened.append(Watched(browser, address, viewport, **options))
        return opened[-1]

    yield open_tab
    for one in opened:
        one.close()
