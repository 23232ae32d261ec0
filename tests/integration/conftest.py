"""What several tests of whole deployments start from."""

from __future__ import annotations

import pytest

import paceline


@pytest.fixture
def service(cluster):
    """A client of the test module's cluster."""
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        yield service
