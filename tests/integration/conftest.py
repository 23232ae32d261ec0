"""What several tests of whole deployments start from."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.stacks.warm_processes import VARIABLE
from support.stacks.warm_trainer import WarmTrainer

import paceline


@pytest.fixture
def service(cluster):
    """A client of the test module's cluster."""
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        yield service


@pytest.fixture(scope="module")
def forked_engines():
    """Trainer's engines of one rank are forked: their `pid` is then that of a process that stands in for them."""
    with pytest.MonkeyPatch.context() as patch:
        if warm := os.environ.get(VARIABLE):
            patch.setattr(sys, "executable", str(Path(warm) / "python"))
        yield


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    trainer = WarmTrainer(tmp_path_factory.mktemp("recovery"))
    yield trainer
    trainer.close()


@pytest.fixture
def fresh_trainer(warm, tmp_path):
    """A trainer on a volume of its own. (A fixture of this folder hides those of the modules' plugins.)"""
    warm.volume = tmp_path / "volume"
    warm.environment["PACELINE_TRAINER_CHECKPOINT_DIR"] = str(warm.volume)
    warm.log = tmp_path / "trainer.log"
    yield warm
    with suppress(ProcessLookupError):  # it has ended
        warm.service.kill()
        warm.service.wait(20)
