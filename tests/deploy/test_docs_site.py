"""`make docs`: a site without a warning, from pages whose links work in both places, that asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import docs_site
import pytest
from proto_pages import proto_pages
from support.stacks.deploy_files import ROOT

PACKAGES = Path(sys.prefix) / "docs"
needs_packages = pytest.mark.skipif(not (PACKAGES / "mkdocs").exists(), reason="needs the packages of `make docs`")


class Assets(HTMLParser):
    """The addresses that a page loads, as opposed to those that it links to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "src" or (name == "href" and tag == "link")):
                self.found.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("docs") / "site"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, str(ROOT / "scripts" / "docs_site.py"), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@needs_packages
def test_the_site_has_every_page_and_asks_no_other_host(site: Path) -> None:
    for page in ("index", "docs/how-to/index", "docs/client", "bench/results/training", "reference/grpc/trainer"):
        assert (site / f"{page}.html").exists(), page
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert not {address for page in pages.values() for address in Assets(page).found if "//" in address}
    styles = "\n".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//", styles)


@needs_packages
def test_the_reference_has_the_docstrings_of_the_client_and_the_comments_of_the_contracts(site: Path) -> None:
    clients = (site / "reference" / "clients.html").read_text()
    for name in (
        "TrainingClient.forward_backward",
        "ServiceClient.list_runs",
        "ServiceClient.create_lora_training_client",
    ):
        assert f'id="paceline.{name}"' in clients
    assert "PublishWeights" in (site / "reference" / "grpc" / "trainer.html").read_text()


def test_every_contract_has_a_page_with_its_methods_fields_and_comments() -> None:
    pages = proto_pages(ROOT)
    assert pages.keys() == {path.name for path in (ROOT / "proto" / "paceline").iterdir()}
    for contract in (ROOT / "proto").rglob("*.proto"):
        text, page = contract.read_text(), pages[contract.parts[-3]]
        for name in re.findall(r"^\s*(?:rpc|message|enum) (\w+)", text, re.MULTILINE):
            assert re.search(rf"^## (?:\w+\.)*{name}$", page, re.MULTILINE), name
    assert "| `values` | map of string to double | Output only. The values by name." in pages["metrics"]


def test_the_menu_has_the_pages_of_the_tables() -> None:
    listed = {path for entry in docs_site.menu([]) for path in re.findall(r"[\w./-]+\.md", str(entry))}
    pages = {str(path.relative_to(ROOT)) for folder in docs_site.FOLDERS for path in (ROOT / folder).rglob("*.md")}
    assert not {path for path in listed if not (ROOT / path).exists()}
    assert not {page for page in pages - listed if page.startswith("docs/")}, "list it among README's documents"
