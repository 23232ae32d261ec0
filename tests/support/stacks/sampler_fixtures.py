"""Fixtures for tests that run a sampler; a test module lists this module in `pytest_plugins`."""

from __future__ import annotations

import pytest

from paceline.layout import Volume
from support.models.tiny_models import make_tiny_llama
from support.stacks.sampler_stack import sampling
from support.stacks.weight_stack import BASE, Trainer, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model") / BASE)


@pytest.fixture
def volume(tmp_path):
    return Volume(tmp_path / "volume")


@pytest.fixture
def trainer(volume):
    return Trainer(volume)


@pytest.fixture
async def port(trainer):
    async with serving(trainer) as bound:
        yield bound


@pytest.fixture
async def client(model, port, tmp_path):
    async with sampling(model, port, tmp_path) as sampler:
        yield sampler
