"""The certificate sees what begins beyond its probe: windows, chunks and contexts that a configuration names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models.engine_cases import make_data, train
from support.models.tiny_models import VOCAB_SIZE, make_tiny
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    MiniMaxM3VLTextConfig,
    MistralConfig,
    Qwen2Config,
)

from paceline.errors import Unsupported
from paceline.types import LoraConfig, PackingMode
from trainer_service.engine.certificate.boundaries import LOWERED, find_boundaries
from trainer_service.engine.certificate.stock import CONTEXT_FIELDS
from trainer_service.engine.model import fused_layers, packed_attention
from trainer_service.engine.model.packed_attention import PACKED_ATTENTION
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_local_experts": 2, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIGS = {
    "chunk": Llama4TextConfig(**_SHAPE, **_EXPERTS, attention_chunk_size=100, no_rope_layers=[1, 1]),
    "window of all": MistralConfig(**_SHAPE, sliding_window=100),
    "window of a layer": Gemma3TextConfig(
        **_SHAPE, sliding_window=100, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16
    ),
    "window of a fused layer": Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=100, layer_types=["sliding_attention", "full_attention"]
    ),
    "context": MistralConfig(**_SHAPE, rope_parameters=_LLAMA3, sliding_window=None),
}
NAMES = {
    "chunk": {"attention_chunk_size", "floor_scale"},
    "window of all": {"sliding_window"},
    "window of a layer": {"sliding_window"},
    "window of a fused layer": {"sliding_window"},
    "context": {"rope_parameters.original_max_position_embeddings"},
}
PACKED = set(CONFIGS) - {"chunk"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("beyond") for name in CONFIGS}
    for name, config in CONFIGS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
    return made


def open_stock(directory):
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@torch.no_grad()
def stock_loss(model, data):
    total = 0.0
    for datum in data:
        logits = model(input_ids=torch.from_numpy(datum.model_input.astype(np.int64))[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
        total -= float((logprobs * datum.loss_fn_inputs["weights"] * datum.loss_fn_inputs["mask"]).sum())
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_trained_beyond_a_boundary_is_what_stock_transformers_trains(directories, name):
    engine = PeftEngine(EngineOptions(str(directories[name]), "tiny", pack_tokens=512))
    certificate = engine.describe().certificate
    assert (certificate.packing is PackingMode.PACKED) == (name in PACKED), certificate.reason
    engine.create_run("run", LoraConfig(rank=4, train_mlp=False))  # which changes nothing yet
    data = make_data((160, 30))
    expected = stock_loss(open_stock(directories[name]), data)
    assert train(engine, data=data).metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_boundaries_are_found_lowered_and_put_back(directories, name):
    model, tokens = open_stock(directories[name]), torch.arange(40)[None] % 200
    found = find_boundaries(model, 72, CONTEXT_FIELDS)
    assert set(found.names.split(", ")) == NAMES[name]
    with torch.no_grad():
        before = model(tokens).logits
        with found.applied(model):
            lowered = model(tokens).logits
        after = model(tokens).logits
    assert torch.equal(before, after)
    assert not torch.allclose(before[:, LOWERED:], lowered[:, LOWERED:])


def test_a_choice_of_blocks_that_no_field_alone_tells_is_not_packed(tmp_path):
    """Only sequences beyond 12 blocks of 8 tokens see part of their past, and the probe is shorter."""
    sparse = {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 16}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    config = MiniMaxM3VLTextConfig(**_SHAPE, **sparse, **experts, index_block_size=8, index_topk_blocks=12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = PeftEngine(EngineOptions(str(tmp_path), "tiny", pack_tokens=512))
    certificate = engine.describe().certificate
    assert certificate.packing is PackingMode.ONE_SEQUENCE
    assert "uses block_indices, which packed attention does not compute" in certificate.reason
    engine.create_run("run", LoraConfig(rank=4, train_mlp=False))  # which changes nothing yet
    data = make_data((160, 30))
    expected = stock_loss(open_stock(tmp_path), data)
    assert train(engine, data=data).metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_lengths_within_the_probe_and_sizes_are_no_boundaries(tmp_path):
    model = open_stock(make_tiny("qwen3_moe", tmp_path, sliding_window=48, use_sliding_window=True))
    assert find_boundaries(model, 72, CONTEXT_FIELDS) is None


@pytest.mark.parametrize("name", ["window of all", "window of a layer", "window of a fused layer"])
def test_packed_attention_that_ignores_a_window_is_not_used(directories, monkeypatch, name):
    right = packed_attention.packed_attention

    def everywhere(*arguments, sliding_window=None, **options):
        return right(*arguments, **options)

    monkeypatch.setitem(packed_attention.AttentionInterface._global_mapping, PACKED_ATTENTION, everywhere)
    monkeypatch.setattr(fused_layers, "packed_attention", everywhere)
    certificate = PeftEngine(EngineOptions(str(directories[name]), "tiny")).describe().certificate
    assert certificate.packing is PackingMode.ONE_SEQUENCE
    assert "self_attn" in certificate.reason
    assert certificate.reason.endswith("(for sequences beyond sliding_window).")


def test_a_window_of_no_tokens_is_refused_by_its_name(tmp_path):
    directory = make_tiny("mistral", tmp_path, sliding_window=0)
    with pytest.raises(Unsupported, match=r"sliding_window is 0 in config.json; set null for no window\.$"):
        PeftEngine(EngineOptions(str(directory), "tiny"))
