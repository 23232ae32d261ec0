"""What an engine finds out about a base model before it serves it, and how it reacts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from support.models.engine_cases import MAKERS, gradients, make_data, train, warmed, weights
from support.models.tiny_models import VOCAB_SIZE, make_tiny
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPTNeoConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3_5TextConfig,
)
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from paceline.errors import Unsupported
from paceline.types import AdamParams, ForwardBackwardSpec, FullParameters, LoraConfig, PackingMode
from trainer_service.engine.certificate import certified_base, stock
from trainer_service.engine.microbatch import passes
from trainer_service.engine.model import base_model, fused_layers, packed_attention
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
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [float(n) for n in range(4, 12)],
    "original_max_position_embeddings": 20,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
CONFIGS = {
    "qwen3_5": Qwen3_5TextConfig(**_SHAPE, **_QWEN3_5),
    "longrope": Phi3Config(**_SHAPE, rope_parameters=_LONGROPE, sliding_window=None),
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=4),
    "gemma2": Gemma2Config(**_SHAPE, final_logit_softcapping=None, query_pre_attn_scalar=16),
    "dynamic": LlamaConfig(**{**_SHAPE, "max_position_embeddings": 20}, rope_parameters=_DYNAMIC),
    "capped": Gemma2Config(
        **_SHAPE, final_logit_softcapping=5.0, attn_logit_softcapping=None, query_pre_attn_scalar=16
    ),
    "gpt_neo": GPTNeoConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        max_position_embeddings=256,
        window_size=8,
        initializer_range=0.2,
    ),
}
ONE_SEQUENCE = {
    "qwen3_5": "model.layers.0.linear_attn",
    "longrope": "model.rotary_emb (Phi3RotaryEmbedding)",
    "gemma2": "Gemma2Attention uses softcap",
    "dynamic": "model.rotary_emb (LlamaRotaryEmbedding)",
    "gpt_neo": "GPTNeoForCausalLM",
    "capped": "lm_head (Linear) does not compute the final logits",
}
"""Models whose sequences cannot share a pass, and what the stated reason names."""


def save(config, directory):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def odd_models(tmp_path_factory):
    return {name: save(config, tmp_path_factory.mktemp(name)) for name, config in CONFIGS.items()}


@pytest.fixture
def make_engine(models, odd_models):
    def make(name, **options):
        return PeftEngine(EngineOptions(str((models | odd_models)[name]), "tiny", **options))

    return make


def stock_gradients(directory, modules, state, data):
    """Return loss and gradients of cross entropy by transformers and PEFT, one datum at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model = get_peft_model(model, PeftLoraConfig(r=4, lora_alpha=8, target_modules=list(modules))).eval()
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.data.copy_(state[name])
    total = 0.0
    for datum in data:
        logits = model(input_ids=torch.from_numpy(datum.model_input.astype(np.int64))[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        loss = -(logprobs * torch.from_numpy(datum.loss_fn_inputs["weights"] * datum.loss_fn_inputs["mask"])).sum()
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in trained.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*MAKERS, "mixtral"])
def test_a_model_whose_sequences_share_passes_rightly_is_packed(make_engine, name, dtype):
    certificate = make_engine(name, dtype=dtype).describe().certificate
    assert (certificate.packing, certificate.attention) == (PackingMode.PACKED, PACKED_ATTENTION)
    assert certificate.reason == ""
    assert certificate.tokens > 100
    assert 0 < certificate.logprob_difference <= certificate.logprob_bound < (1e-3 if dtype == "float32" else 1)
    assert 0 < certificate.gradient_difference <= certificate.gradient_bound < (1e-3 if dtype == "float32" else 1)
    assert certificate.seconds > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ONE_SEQUENCE)
def test_a_model_whose_sequences_cannot_share_a_pass_has_one_a_pass_and_says_why(make_engine, name, dtype, caplog):
    with caplog.at_level("INFO", "trainer_service.engine"):
        certificate = make_engine(name, dtype=dtype).describe().certificate
    assert certificate.packing is PackingMode.ONE_SEQUENCE
    assert certificate.attention == ("eager" if name in {"gemma2", "gpt_neo"} else "sdpa")
    assert ONE_SEQUENCE[name] in certificate.reason
    assert certificate.reason.endswith(".")
    assert certificate.reason in caplog.text


@pytest.mark.parametrize("name", CONFIGS)
def test_every_served_model_trains_as_stock_transformers_does_beside_another_run(make_engine, odd_models, name):
    engine = make_engine(name, joint_passes=True, pack_tokens=64)
    info = engine.create_run("run", LoraConfig(rank=4, train_mlp=False))
    engine.create_run("other", LoraConfig(rank=4, seed=1, train_mlp=False))
    warmed(engine)
    data = make_data((5, 50, 9, 30))
    for run_id, own in {"other": make_data((70, 3), seed=1), "run": data}.items():
        engine.begin(run_id, own, ForwardBackwardSpec("cross_entropy"))
    done = []
    while engine.is_busy:
        done += engine.advance(lambda _: None)
    (output,) = (job.output() for job in done if job.run_id == "run")
    loss, expected = stock_gradients(odd_models[name], info.modules, weights(engine), data)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    for key, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-3, atol=2e-3 * expected[key].abs().max().item())


@pytest.mark.parametrize("name", ["qwen3_5", "longrope", "capped"])
def test_full_parameter_runs_go_one_sequence_a_pass_too(make_engine, odd_models, name):
    engine, data = make_engine(name), make_data((5, 50, 9, 30))
    engine.create_run("run", FullParameters())
    train(engine, data=data)
    model = AutoModelForCausalLM.from_pretrained(odd_models[name], attn_implementation="eager").eval()
    for datum in data:
        logits = model(input_ids=torch.from_numpy(datum.model_input.astype(np.int64))[None], use_cache=False).logits[0]
        lp = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.loss_fn_inputs["target_tokens"])[:, None])[:, 0]
        (-(lp * torch.from_numpy(datum.loss_fn_inputs["weights"] * datum.loss_fn_inputs["mask"])).sum()).backward()
    expected = dict(model.named_parameters())
    for key, gradient in gradients(engine).items():
        wanted = expected[key].grad if expected[key].grad is not None else torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=2e-3 * wanted.abs().max().item() + 1e-6)
    assert engine.optim_step("run", AdamParams()).grad_norm > 0


@pytest.fixture
def draws(monkeypatch):
    """Return the seeds of the tokens drawn so far, in order."""
    drawn: list[int] = []

    def make_probe(config, seed, sequences):
        if sequences is stock.LENGTHS:
            drawn.append(seed)
        return stock.make_probe(config, seed, sequences)

    monkeypatch.setattr(certified_base, "make_probe", make_probe)
    return drawn


@pytest.fixture
def break_ties(monkeypatch, draws):
    """Return a function that gives the last token of some draws another expert when sequences share a pass."""
    right = MixtralTopKRouter.forward

    def break_them(seeds):
        def route(self, hidden_states):
            logits, scores, chosen = right(self, hidden_states)
            if draws[-1] in seeds and len(logits) > max(map(max, stock.LENGTHS.values())):
                chosen = torch.cat([chosen[:-1], logits[-1:].argsort()[:, : self.top_k]])
            return logits, scores, chosen

        monkeypatch.setattr(MixtralTopKRouter, "forward", route)

    return break_them


def test_a_mixture_is_packed_though_a_tie_between_experts_is_broken_otherwise(make_engine, draws, break_ties):
    break_ties({0, 1})
    certificate = make_engine("mixtral").describe().certificate
    assert draws == [0, 1, 2]
    assert certificate.packing is PackingMode.PACKED
    assert 0 < certificate.logprob_difference <= certificate.logprob_bound < 1e-3


def test_tokens_that_differ_at_every_draw_are_no_chance(make_engine, draws, break_ties):
    break_ties(range(9))
    certificate = make_engine("mixtral").describe().certificate
    assert draws == [0, 1, 2, 3]
    assert certificate.packing is PackingMode.ONE_SEQUENCE


LEAKS = {
    "every token sees the sequence before": lambda lengths: (sum(lengths),),
    "one token does": lambda lengths: (lengths[0] + 1, lengths[1] - 1, *lengths[2:]) if len(lengths) > 1 else lengths,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("leaking", LEAKS)
def test_packing_that_is_broken_is_not_used(make_engine, draws, monkeypatch, leaking, dtype):
    right = packed_attention.packed_attention

    def leak(*arguments, segment_lengths, **options):
        return right(*arguments, segment_lengths=LEAKS[leaking](segment_lengths), **options)

    monkeypatch.setitem(packed_attention.AttentionInterface._global_mapping, PACKED_ATTENTION, leak)
    monkeypatch.setattr(fused_layers, "packed_attention", leak)
    certificate = make_engine("llama", dtype=dtype).describe().certificate
    assert certificate.packing is PackingMode.ONE_SEQUENCE
    assert "model.layers.0.self_attn (LlamaAttention) gives different results" in certificate.reason
    assert set(draws) == {0}, "what most tokens show is no chance"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packing_in_which_positions_do_not_restart_is_not_used(tmp_path, monkeypatch, dtype):
    right = base_model.hidden_states

    def go_on(model, mode, input_ids, position_ids, lengths):
        return right(model, mode, input_ids, torch.arange(input_ids.shape[1])[None], lengths)

    for module in (passes, certified_base):
        monkeypatch.setattr(module, "hidden_states", go_on)
    # OPT's positions are learned; rotary ones act by differences, which stay the same.
    engine = PeftEngine(EngineOptions(str(make_tiny("opt", tmp_path)), "tiny", dtype=dtype))
    assert engine.describe().certificate.packing is PackingMode.ONE_SEQUENCE


def test_fused_layers_that_are_broken_are_not_used(make_engine, monkeypatch):
    right = fused_layers.packed_attention
    monkeypatch.setattr(fused_layers, "packed_attention", lambda *a, **o: (right(*a, **o)[0] * 1.01, None))
    engine = make_engine("llama")
    assert engine.describe().certificate.packing is PackingMode.PACKED
    assert not any("Fused" in type(module).__name__ for module in engine.model.modules())


def test_a_model_that_no_way_computes_rightly_is_not_served(make_engine, monkeypatch):
    right = stock.stock_logprobs
    monkeypatch.setattr(stock, "stock_logprobs", lambda *arguments: right(*arguments) * 1.01)
    with pytest.raises(Unsupported, match=r"tiny cannot be served: lm_head \(\w+\) does not compute the final logits"):
        make_engine("llama")


def test_what_cannot_be_right_is_refused_in_a_sentence(tmp_path):
    directory = save(BertConfig(**_SHAPE), tmp_path)
    with pytest.raises(Unsupported, match=r"^tiny cannot be served: BertLMHeadModel is not a causal language model"):
        PeftEngine(EngineOptions(str(directory), "tiny"))


def test_layers_with_dropout_of_their_own_are_recomputed_without_it(tmp_path):
    directory = make_tiny("opt", tmp_path, dropout=0.5)
    certificate = (
        PeftEngine(EngineOptions(str(directory), "tiny", activation_checkpointing=True)).describe().certificate
    )
    assert certificate.packing is PackingMode.PACKED
