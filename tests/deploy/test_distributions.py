"""Distributions hold no files that were generated locally."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from support.stacks.deploy_files import ROOT, make_secrets


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a small checkout with the files that commands leave behind."""
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("paceline/__init__.py", "gateway/__init__.py", "trainer_service/__init__.py", "results/curve.svg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    make_secrets(tmp_path / "deploy" / "secrets")
    shutil.copy(ROOT / "deploy" / "secrets" / ".gitignore", tmp_path / "deploy" / "secrets")
    for state in (".paceline", ".paceline/demo"):
        (tmp_path / state / "keys").mkdir(parents=True)
        (tmp_path / state / "api_key").write_text("pl-a-key")
    return tmp_path


@pytest.mark.parametrize("builder", [SdistBuilder, WheelBuilder])
def test_a_distribution_holds_neither_secrets_nor_results(tree: Path, builder: type[SdistBuilder]) -> None:
    packed = {file.distribution_path for file in builder(str(tree)).recurse_included_files()}
    assert "paceline/__init__.py" in packed
    assert not [path for path in packed if path.startswith(("deploy/secrets", ".paceline", "results"))]
