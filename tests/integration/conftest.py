"""Fixtures for tests of whole deployments."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.stacks.toy_services import toy_server
from support.stacks.warm_processes import VARIABLE, WarmProcesses
from support.stacks.warm_trainer import WarmTrainer

import paceline


@pytest.fixture
def service(cluster):
    """A client of the test module's cluster."""
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        yield service


@pytest.fixture
async def server():
    """A toy trainer behind gRPC, in this process."""
    async with toy_server() as running:
        yield running


@pytest.fixture
async def training(server, client):
    """A training client of the toy trainer's run, from the test module's own `client`."""
    return await client.get_training_client_async(server.trainer.run_id)


@pytest.fixture(scope="module")
def forked_engines():
    """Fork trainer engines, their ranks, and members of process groups.

    Their `pid` is then that of a process that stands in for the fork.
    """
    with pytest.MonkeyPatch.context() as patch:
        if warm := os.environ.get(VARIABLE):
            patch.setattr(sys, "executable", str(WarmProcesses(Path(warm)).python))
        yield


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    trainer = WarmTrainer(tmp_path_factory.mktemp("recovery"))
    yield trainer
    trainer.close()


@pytest.fixture
def fresh_trainer(warm, tmp_path):
    """A trainer on its own volume. (The name `trainer` would hide the fixtures of the modules' plugins.)"""
    warm.volume = tmp_path / "volume"
    warm.environment["PACELINE_TRAINER_CHECKPOINT_DIR"] = str(warm.volume)
    warm.log = tmp_path / "trainer.log"
    yield warm
    with suppress(ProcessLookupError):  # already ended
        warm.service.kill()
        warm.service.wait(20)
