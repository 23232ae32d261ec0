"""The pages of docs/how-to: their commands and their code run as they are printed, on a tiny model."""

from __future__ import annotations

import pytest
from support.doc_pages import ROOT
from support.models.tiny_models import make_tiny_llama
from support.page_code import PageRunner, blocks
from support.stacks.cluster import Cluster

pytestmark = pytest.mark.services
FOLDER = ROOT / "docs" / "how-to"
OWN_TESTS = {"serve-your-lab", "back-up-restore-upgrade"}
"""Pages whose commands start services themselves."""
PAGES = sorted({path.stem for path in FOLDER.glob("*.md")} - OWN_TESTS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("how_to")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model", context=1024), engine="vllm")
    with cluster.running():
        yield cluster


@pytest.fixture
def runner(cluster, request, tmp_path, monkeypatch):
    """A session in a directory in which `paceline up` runs."""
    (tmp_path / ".paceline").symlink_to(cluster.state)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PACELINE_ADDRESS", cluster.address)
    monkeypatch.setenv("PACELINE_API_KEY", cluster.api_key)
    http = cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]

    def changed(text):
        return text.replace("127.0.0.1:50050", cluster.address).replace("127.0.0.1:50053", http)

    return PageRunner(request.node.name, tmp_path, monkeypatch, changed)


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_and_the_code_of_a_page_run(name, runner):
    found = [block for block in blocks((FOLDER / f"{name}.md").read_text()) if not block.note.startswith("not run")]
    assert found
    for block in found:
        runner.run(block)
