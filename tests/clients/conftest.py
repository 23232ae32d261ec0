"""Fixtures for tests of other projects' clients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def client_packages():
    """Return a function that installs a requirements file once, into its own folder, and returns that folder."""

    def install(requirements):
        folder = _ROOT / ".venv" / "clients" / requirements
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*command, "-r", str(_ROOT / "requirements" / f"{requirements}.txt")], check=True)
        return folder

    return install
