"""One engine of each kind for the whole session, because vLLM starts slowly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, get_peft_model
from support.stacks.sampler_contract import IDS, TARGETS, Reference, make_model, options_for
from transformers import AutoModelForCausalLM

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
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        path = tmp_path / f"adapter-{number}"
        model.save_pretrained(path, save_embedding_layers=False)
        return Adapter(number, f"run@{number}", path)

    return make
