"""What several tests of the engine start from."""

from __future__ import annotations

import pytest
from engine_cases import MAKERS


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A tiny model of each architecture, by name."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}
