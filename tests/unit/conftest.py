"""Fixtures for several tests of the engine."""

from __future__ import annotations

import pytest
from support.models.engine_cases import MAKERS
from support.models.known_certificates import KnownCertificates

_CERTIFY = {
    "test_certified_base",
    "test_models_table",
    "test_module_groups",
    "test_fused_layers",
    "test_weight_sharing",
}
"""Files that test what an engine finds out about a model when it loads it."""


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Make a tiny model of each architecture, by name."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(scope="session")
def known():
    """Certificates of models that tests have loaded."""
    return KnownCertificates()


@pytest.fixture(scope="module", autouse=True)
def _certificates_are_known(request, known):
    if request.path.stem in _CERTIFY:
        yield
        return
    with known.used():
        yield
