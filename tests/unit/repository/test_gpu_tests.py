"""The tests that need a GPU run elsewhere; check here that they and all their imports can be imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).resolve().parents[2] / "gpu").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_gpu_tests_is_whole(path):
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert path.stem == "lender" or any(name.startswith("test_") for name in vars(module))
