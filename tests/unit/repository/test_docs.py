"""The documentation matches the code: every error, loss and setting is listed, and no link is broken."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from support.doc_pages import ROOT, page, rows, section, shown

from gateway.settings import GatewaySettings
from paceline.errors import CATALOG
from paceline.settings import PeerSettings, ServiceSettings
from paceline.types.optimizers import OPTIMIZERS
from paceline.types.v1.error_reason_pb2 import ErrorReason
from sampler_service.settings import SamplerSettings
from trainer_service.engine_link.loss_specs import LOSS_SPECS
from trainer_service.settings import TrainerSettings

FOLDERS = ("docs", "deploy", "bench")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
SERVICES = {"Trainer": TrainerSettings, "Sampler": SamplerSettings, "Gateway": GatewaySettings}
COMMON = "Every service"


def test_every_error_is_listed_with_its_status_and_class():
    listed = {reason: cells[:2] for reason, cells in rows(page("errors.md")).items()}
    assert listed == {reason: [cls.code.name, cls.__name__] for reason, cls in CATALOG.items()}


def test_every_reason_of_the_contract_is_listed():
    named = {name.removeprefix("ERROR_REASON_") for name in ErrorReason.DESCRIPTOR.values_by_name} - {"UNSPECIFIED"}
    assert named == rows(page("errors.md")).keys()


@pytest.mark.parametrize("name", LOSS_SPECS)
def test_every_loss_is_described_with_its_settings_and_defaults(name):
    described = {setting: float(cells[0]) for setting, cells in rows(section(page("losses.md"), name)).items()}
    assert described == {setting: spec.default for setting, spec in LOSS_SPECS[name].settings.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_described_with_its_settings_and_defaults(name):
    described = {setting: cells[0] for setting, cells in rows(section(page("optimizers.md"), name)).items()}
    assert described == {setting.name: shown(setting.default) for setting in fields(OPTIMIZERS[name])}


def test_every_loss_input_is_listed():
    inputs = {name for spec in LOSS_SPECS.values() for name in (*spec.required, *spec.optional)}
    assert rows(section(page("losses.md"), "Inputs")).keys() == inputs


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_is_listed_with_its_default(service):
    text = page("settings.md")
    common, own = rows(section(text, COMMON)), rows(section(text, service))
    fields = SERVICES[service].model_fields
    listed = {name: {**common, **own}[name][0] for name in [*common, *own]}
    assert listed == {name: shown(field.default) for name, field in fields.items()}


def test_settings_of_every_service_are_those_that_they_inherit():
    inherited = ServiceSettings.model_fields.keys() | PeerSettings.model_fields.keys()
    assert rows(section(page("settings.md"), COMMON)).keys() == inherited


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path):
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", path.read_text())
    broken = [link for link in links if not link.startswith(("http:", "https:", "mailto:")) and not leads(path, link)]
    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_of_code_that_a_page_names_exists(path):
    """A page may name a file by the end of its path, as tables of a folder do."""
    named = set(re.findall(r"`(?:\./)?([\w./-]+\.(?:py|proto|sh|toml|yaml))`", path.read_text()))
    assert not {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in FILES)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lists_and_tables_in_lists_are_indented_as_the_site_needs_it(path):
    """By four spaces: with two, Markdown in Python takes them for a part of the outer list."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^ {1,3}(?:[-*] |\||```).*", prose, re.MULTILINE)


def leads(page_path: Path, link: str) -> bool:
    """Whether a link's file exists and, if the link names a heading, the heading too."""
    name, _, anchor = link.partition("#")
    target = (page_path.parent / name).resolve() if name else page_path
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_how_to_page_is_listed():
    folder = ROOT / "docs" / "how-to"
    listed = set(re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in folder.glob("*.md")} - {"README.md"}


def test_readme_teaches_in_ten_lines_of_client_code():
    code = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert code
    assert len(code[1].splitlines()) == 10
    compile(code[1], "README.md", "exec")


def test_every_test_that_the_page_of_kills_names_exists():
    named = set(re.findall(r"`(test_\w+)`", page("kills.md")))
    files = [ROOT / name for name in FILES if name.startswith("tests/") and name.endswith(".py")]
    defined = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text())}
    assert named
    assert named <= defined, named - defined
