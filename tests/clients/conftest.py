"""What tests of other projects' clients start from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def client_packages():
    """Return a function that installs a file of requirements in a folder of its own, once, and returns the folder."""

    def install(requirements):
        folder = _ROOT / ".venv" / "clients" / requirements
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*command, "-r", str(_ROOT / "requirements" / f"{requirements}.txt")], check=True)
        return folder

    return install
