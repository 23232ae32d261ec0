"""One engine of each kind for the whole session, because vLLM starts slowly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.stacks.sampler_contract import IDS, TARGETS, Reference, make_model, options_for
from support.stacks.weight_stack import make_adapter as write_adapter

from sampler_service.engine.factory import create_engine
from sampler_service.engine.protocol import Adapter, SamplerEngine


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Reference:
    return Reference(model_path)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["hf", "vllm", "vllm stock"])
async def engine(request: pytest.FixtureRequest, model_path: Path, vllm_here: None) -> AsyncIterator[SamplerEngine]:
    kind, _, way = request.param.partition(" ")
    engine = create_engine(kind, replace(options_for(model_path), apply=way or "direct", outputs=way or "direct"))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def make_adapter(model_path: Path, tmp_path: Path):
    def make(rank: int = 4, targets: list[str] | str = TARGETS, base: Path = model_path) -> Adapter:
        number = next(IDS)
        modules = targets if isinstance(targets, str) else tuple(targets)
        path = write_adapter(tmp_path / f"adapter-{number}", base, number, rank, modules)
        return Adapter(number, f"run@{number}", path)

    return make
