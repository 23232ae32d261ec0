"""`scripts/install.sh` marks an installation as done only if torch and vLLM can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stacks.deploy_files import ROOT

REASON = "ImportError: libcudnn.so.9: cannot open shared object file"

PYTHON = """#!/bin/sh
# Makes an environment in which pip installs the torch of BROKEN, and nothing else.
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && {{ [ "$0" -ef "$3/bin/python" ] || cp "$0" "$3/bin/python"; }} ;;
"-m pip") shift 2; echo "$@" >> "$BROKEN/asked" ;;
*) PYTHONPATH=$BROKEN exec {python} "$@" ;;
esac
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Return a folder with a torch that cannot be imported, like the CUDA build without its dependencies."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text('raise ImportError("libcudnn.so.9: cannot open shared object file")')
    return tmp_path / "broken"


def install(venv: Path, python: Path | str, broken: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "install.sh", venv, python],
        cwd=ROOT,
        env=os.environ | {"BROKEN": str(broken)},
        check=False,
        capture_output=True,
        text=True,
    )


def test_an_installation_that_cannot_be_imported_fails_with_the_reason_and_without_a_mark(
    tmp_path: Path, broken: Path
) -> None:
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    venv.mkdir()
    (venv / ".installed").touch()
    done = install(venv, python, broken)
    assert done.returncode == 1
    assert f"torch cannot be imported: {REASON}" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"The installation in {venv} does not work")
    assert not (venv / ".installed").exists()

    # torch is installed with its dependencies; everything else is a closed set.
    torch, *others = (broken / "asked").read_text().splitlines()
    assert torch.endswith(" --constraint requirements/cpu.txt torch")
    assert "--no-deps" not in torch
    assert others
    assert all("--no-deps" in line for line in others)


def test_a_python_that_will_not_do_is_refused_by_its_name(tmp_path: Path, broken: Path) -> None:
    done = install(tmp_path / "venv", "/no/such/python", broken)
    assert done.returncode == 1
    assert "/no/such/python" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "venv").exists()


def test_what_an_interpreter_says_instead_of_running_is_shown(tmp_path: Path, broken: Path) -> None:
    shim = tmp_path / "python3.13"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    said, last = install(tmp_path / "venv", shim, broken).stderr.splitlines()
    assert said == "pyenv: python3.13: command not found"
    assert str(shim) in last


@pytest.fixture
def pythons(tmp_path: Path) -> Callable[[str], Path]:
    """Return a maker of interpreters that say that they are of a version, and make environments that say the same."""

    def make(version: str) -> Path:
        python = tmp_path / f"python{version}"
        code = f"import sys; sys.version_info = (*map(int, {version!r}.split('.')), 0)\n"
        (tmp_path / f"as{version}").mkdir()
        (tmp_path / f"as{version}" / "sitecustomize.py").write_text(code)
        text = PYTHON.replace("PYTHONPATH=$BROKEN", f"PYTHONPATH={tmp_path}/as{version}:$BROKEN")
        python.write_text(text.format(python=sys.executable))
        python.chmod(0o755)
        return python

    return make


def test_an_environment_keeps_the_interpreter_that_it_was_made_with(
    tmp_path: Path, broken: Path, pythons: Callable[[str], Path]
) -> None:
    venv = tmp_path / "venv"
    install(venv, pythons("3.13"), broken)
    made = (venv / "bin" / "python").read_text()
    assert "as3.13" in made
    assert REASON in install(venv, "", broken).stderr
    assert (venv / "bin" / "python").read_text() == made

    refused = install(venv, pythons("3.12"), broken)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"{venv} was made with Python 3.13; remove it")
    assert (venv / "bin" / "python").read_text() == made
