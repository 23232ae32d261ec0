"""Which models can replace vLLM's in place; a file of another shape is refused beforehand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from support.models.tiny_models import make_tiny_llama
from support.stacks.sampler_contract import ask, one

from paceline.errors import EngineUnavailable, ModelNotLoadable
from paceline.layout import MODEL_FILE
from paceline.types import SamplingParams
from sampler_service.engine.options import EngineOptions
from sampler_service.engine.protocol import TextEndpoint, TextRequest, TextSampling
from sampler_service.engine.vllm.in_place import ReplaceableVllmEngine, WritableVllmEngine


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("base"), tied=request.param)


@pytest.fixture
def engine(base):
    return ReplaceableVllmEngine(EngineOptions(base, "tiny"))


def _without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


NORM = "model.layers.0.input_layernorm.weight"
OTHERS = {
    "a parameter is missing": lambda tensors: _without(tensors, NORM),
    "one too many": lambda tensors: {**tensors, "model.layers.0.extra.weight": tensors[NORM].clone()},
    "another shape": lambda tensors: {**tensors, NORM: tensors[NORM][:-1].clone()},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
async def test_a_file_of_another_shape_is_refused(engine, base, tmp_path, change):
    save_file(change(load_file(base / MODEL_FILE)), tmp_path / MODEL_FILE)
    with pytest.raises(ModelNotLoadable, match="not as in the base model"):
        await engine.change_model(tmp_path)


async def test_after_a_change_that_fails_halfway_nothing_is_sampled(engine, base):
    async def broken(*_, **__):
        raise RuntimeError("a worker died")

    engine._started = SimpleNamespace(llm=SimpleNamespace(collective_rpc=broken), info=engine)
    assert engine.describe() is engine
    with pytest.raises(EngineUnavailable):
        await engine.change_model(base)
    with pytest.raises(EngineUnavailable):
        await one(engine, ask())
    with pytest.raises(EngineUnavailable):
        await engine.compute_logprobs([1, 2], None, "team")
    with pytest.raises(EngineUnavailable):
        await engine.check_health()


async def test_a_file_that_is_none_is_refused(engine, tmp_path):
    with pytest.raises(ModelNotLoadable):
        await engine.change_model(tmp_path)
    (tmp_path / MODEL_FILE).write_bytes(b"{}")
    with pytest.raises(ModelNotLoadable):
        await engine.change_model(tmp_path)


async def test_the_base_models_own_shape_is_taken_as_far_as_there_is_an_engine(engine, base, tmp_path):
    tensors = load_file(base / MODEL_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # even if it is tied
    save_file(tensors, tmp_path / MODEL_FILE)
    with pytest.raises(EngineUnavailable):
        await engine.change_model(tmp_path)


class Salts:
    """A vLLM engine that records the salts of what it is asked to sample."""

    model_config = SimpleNamespace(max_model_len=10)

    def __init__(self):
        self.salts = []

    async def update_weight_version(self, version):
        pass

    async def complete(self, request):
        self.salts.append(request.tenant)
        yield b""


async def test_text_that_is_sampled_after_a_write_shares_no_prefix_with_text_before_it(base, tmp_path, monkeypatch):
    engine = WritableVllmEngine(EngineOptions(base, "tiny", base_dir=tmp_path, in_place="hogwild"))
    llm = Salts()
    engine._started = SimpleNamespace(llm=llm, info=None)

    async def server(_):
        return llm

    monkeypatch.setattr(engine, "_text_server", server)
    request = TextRequest(TextEndpoint.COMPLETIONS, {}, TextSampling(SamplingParams()), None, "team", None, None)
    for version in (1, 2):
        async for _ in engine.complete_text(request):
            pass
        await engine.begin_write(version)
        await engine.end_write(version)
    assert len(set(llm.salts)) == 2
    assert all(salt.startswith("team/") for salt in llm.salts)
