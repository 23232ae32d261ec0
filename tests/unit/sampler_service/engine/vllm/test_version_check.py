"""A vLLM whose internals differ from the known ones is refused in one sentence, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import vllm
from support.models.tiny_models import make_tiny_llama
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from paceline.errors import Unsupported
from sampler_service import __main__ as service
from sampler_service.engine.factory import create_engine
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import EngineUnfit
from sampler_service.engine.vllm.engine import engine_args, prepare_environment
from sampler_service.engine.vllm.version_check import check_text, check_vllm
from sampler_service.settings import SamplerSettings

OPTIONS = EngineOptions(Path("/nowhere"), "tiny")
LENT = replace(OPTIONS, base_dir=Path("/nowhere/base"))


@pytest.mark.parametrize("options", [OPTIONS, LENT], ids=["own", "lent"])
def test_the_vllm_that_is_installed_is_the_one_that_is_known(options):
    check_vllm(options)


def other(self, *, novelty): ...


@pytest.mark.parametrize(
    ("owner", "name", "setting"),
    [
        (OutputProcessor, "process_outputs", "outputs"),
        (OutputProcessor, "add_request", "outputs"),
        (RequestState, "track_weight_version", "outputs"),
        (AsyncLLM, "add_request", "outputs"),
        (BaseLinearLayerWithLoRA, "set_lora", "apply"),
        (PEFTHelper, "validate_legal", "apply"),
        (LRUCacheLoRAModelManager, "remove_oldest_adapter", "apply"),
    ],
)
@pytest.mark.parametrize("how", ["another", "gone"])
def test_what_has_a_stock_way_is_refused_unless_that_is_chosen(owner, name, setting, how, monkeypatch):
    if how == "gone" and owner is not BaseLinearLayerWithLoRA:  # its base class has it too
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, other)
    sentence = rf"vLLM {vllm.__version__} has a different {owner.__name__}.{name} .*requirements/ pins, or set "
    with pytest.raises(EngineUnfit, match=rf"{sentence}PACELINE_SAMPLER_{setting.upper()}=stock"):
        create_engine("vllm", OPTIONS)
    check_vllm(replace(OPTIONS, **{setting: "stock"}))


@pytest.mark.parametrize(("owner", "name"), [(PunicaWrapperCPU, "add_lora_linear"), (AsyncLLM, "collective_rpc")])
def test_what_has_none_says_which_vllm_to_install(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, other)
    for options in (OPTIONS, replace(OPTIONS, apply="stock", outputs="stock")):
        with pytest.raises(EngineUnfit, match=rf"{vllm.__version__} has a different {owner.__name__}.{name} .*pins$"):
            check_vllm(options)


def test_new_parameters_that_may_be_left_out_are_no_reason(monkeypatch):
    def newer(self, index, lora_a, lora_b, novelty=None): ...

    monkeypatch.setattr(BaseLinearLayerWithLoRA, "set_lora", newer)
    check_vllm(OPTIONS)


def test_the_service_ends_with_the_sentence_alone(monkeypatch):
    async def serve(*_):
        raise EngineUnfit("vLLM 9 has another way; install this one")

    settings = SamplerSettings(model="tiny", insecure=True, engine="hf")
    monkeypatch.setattr(service, "load_settings", lambda _: settings)
    monkeypatch.setattr(service, "serve", serve)
    with pytest.raises(SystemExit, match=r"^vLLM 9 has another way; install this one$"):
        service.main()


@pytest.mark.parametrize(("given", "second"), [(None, False), ("0", False), ("1", True)])
def test_the_model_runner_is_the_one_that_was_tested_unless_another_is_asked_for(given, second, monkeypatch, tmp_path):
    """Even with Triton installed, which vLLM's own choice depends on."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", given)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    prepare_environment()
    options = replace(OPTIONS, model_path=make_tiny_llama(tmp_path / "tiny"))
    assert engine_args(options).create_engine_config().use_v2_model_runner is second


def test_what_text_is_served_by_is_known_or_refused_in_a_sentence(monkeypatch):
    check_text()
    monkeypatch.setattr(OpenAIServingModels, "model_name", other)
    with pytest.raises(Unsupported, match=r"a different OpenAIServingModels\.model_name .* install the version"):
        check_text()
