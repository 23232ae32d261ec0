"""`make clean` removes what make created, and leaves and names what users edit or keep."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from support.stacks.deploy_files import ROOT

CREATED = (".venv", "wheels", "paceline/trainer/v1", "gateway/__pycache__")
KEPT = ("deploy/secrets/keys", "results", "cache/paceline/models")


def clean(directory: Path) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(directory / "cache")}
    done = subprocess.run(
        ["make", "clean"], cwd=directory, env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout


def test_cleaning_leaves_secrets_results_and_the_cached_model_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "scripts" / "clean.sh", tmp_path / "scripts")
    for name in (*CREATED, *KEPT):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    said = clean(tmp_path)
    assert [name for name in CREATED if (tmp_path / name).exists()] == []
    assert [name for name in KEPT if not (tmp_path / name / "file").exists()] == []
    assert [line.partition(" (")[0] for line in said.splitlines()] == [
        "left: deploy/secrets",
        "left: results",
        f"left: {tmp_path}/cache/paceline",
    ]
    for name in ("deploy/secrets", "results", "cache"):
        shutil.rmtree(tmp_path / name)
    assert clean(tmp_path) == ""
