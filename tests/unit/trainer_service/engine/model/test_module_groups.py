"""What LoraConfig's groups mean in models of many architectures, and that a run trains exactly that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import PeftModel
from support.models.engine_cases import ADAM, make_data, train, weights
from support.models.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidArgument
from paceline.types import ForwardBackwardSpec, LoraConfig
from trainer_service.engine.model.module_groups import groups_of
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.runs.lora_run import adapt
from trainer_service.engine_link.options import EngineOptions

QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
FUSED = ("query_key_value", "dense")
FOUR = ("dense_h_to_4h", "dense_4h_to_h")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ATTENTION = {
    "llama": (*QKV, "o_proj"),
    "phi3": ("qkv_proj", "o_proj"),
    "glm4": (*QKV, "o_proj"),
    "opt": (*QKV, "out_proj"),
    "phi": (*QKV, "dense"),
    "gpt_neox": FUSED,
    "falcon": FUSED,
    "lfm2": ("in_proj", *QKV, "out_proj"),
    "qwen3_5_text": (*DELTA, *QKV, "o_proj"),
    "qwen2_moe": (*QKV, "o_proj"),
    "qwen3_moe": (*QKV, "o_proj"),
    "deepseek_v3": LATENT,
    "mixtral": (*QKV, "o_proj"),
}
MLP = {
    "llama": GATED,
    "phi3": ("gate_up_proj", "down_proj"),
    "glm4": ("gate_up_proj", "down_proj"),
    "opt": ("fc1", "fc2"),
    "phi": ("fc1", "fc2"),
    "gpt_neox": FOUR,
    "falcon": FOUR,
    "lfm2": ("w1", "w2", "w3"),
    "qwen3_5_text": GATED,
}
EXPERTS = {
    "qwen2_moe": "model.layers.0.mlp.experts is a Qwen2MoeExperts",
    "qwen3_moe": "model.layers.0.mlp.experts is a Qwen3MoeExperts",
    "mixtral": "model.layers.0.mlp.experts is a MixtralExperts",
    "deepseek_v3": "model.layers.0.mlp.gate_proj has a name that PEFT uses for the experts' weights",
}
"""Start of the reason why the MLP is refused, by model type."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return a function that makes a tiny model of any type, each once."""
    made = {}

    def directory(kind):
        if kind not in made:
            made[kind] = make_tiny(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return directory


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def make_engine(directory):
    return PeftEngine(EngineOptions(str(directory), "tiny"))


@pytest.mark.parametrize("kind", ATTENTION)
def test_groups_have_the_architectures_own_names(directories, kind):
    model = load(directories(kind))
    attention, mlp, head = groups_of(model)
    assert [group.name for group in (attention, mlp, head)] == ["train_attn", "train_mlp", "train_unembed"]
    assert (set(attention.modules), attention.refusal) == (set(ATTENTION[kind]), "")
    assert (head.modules, head.refusal) == (("lm_head",), "")
    if kind in MLP:
        assert (set(mlp.modules), mlp.refusal) == (set(MLP[kind]), "")
    else:
        assert mlp.refusal.startswith(EXPERTS[kind])
        assert mlp.refusal.endswith("; set train_mlp=False, or list the modules to adapt in target_modules.")
    adapt(model)
    assert groups_of(model) == (attention, mlp, head)


@pytest.mark.parametrize("kind", ATTENTION)
def test_a_step_changes_what_was_asked_for_and_peft_loads_it(directories, kind, tmp_path):
    engine, stock = make_engine(directories(kind)), load(directories(kind))
    asked = {*ATTENTION[kind], *MLP.get(kind, ())}
    linear = [name for name, module in stock.named_modules() if isinstance(module, torch.nn.Linear)]
    expected = [name for name in linear if name.rpartition(".")[2] in asked]
    info = engine.create_run("run", LoraConfig(rank=2, train_mlp=kind in MLP))
    assert sorted(info.modules) == sorted(expected)

    before, frozen = weights(engine), {id(p): p.clone() for p in engine.model.parameters() if not p.requires_grad}
    data = make_data((12,), masked=False)
    for _ in range(2):  # the first changes only B
        train(engine, data=data)
        engine.optim_step("run", ADAM)
    assert not [name for name, weight in weights(engine).items() if torch.equal(weight, before[name])]
    assert all(torch.equal(p, frozen[id(p)]) for p in engine.model.parameters() if not p.requires_grad)

    engine.save_adapter("run", tmp_path)
    output = engine.forward_backward("run", data, ForwardBackwardSpec("cross_entropy", forward_only=True))
    adapted = PeftModel.from_pretrained(stock, tmp_path)
    assert {name.split(".lora_A")[0] for name, _ in adapted.named_modules() if name.endswith("lora_A")} == {
        f"base_model.model.{name}" for name in expected
    }
    with torch.no_grad():
        logits = adapted(input_ids=torch.from_numpy(data[0].model_input.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(data[0].loss_fn_inputs["target_tokens"])
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"], logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*EXPERTS, "gpt2"])
def test_a_default_run_is_refused_where_it_would_train_a_part(directories, kind):
    engine = make_engine(directories(kind))
    field = "train_attn" if kind == "gpt2" else "train_mlp"
    with pytest.raises(InvalidArgument, match=f"set {field}=False") as caught:
        engine.create_run("run", LoraConfig(rank=2))
    assert caught.value.field == f"lora.{field}"
    head = LoraConfig(rank=2, train_attn=False, train_mlp=False, train_unembed=True)
    assert engine.create_run("run", head).modules == ("lm_head",)


def test_layers_that_the_group_covers_are_not_refused(directories, tmp_path):
    engine = make_engine(make_tiny("qwen2_moe", tmp_path, mlp_only_layers=[0]))
    info = engine.create_run("run", LoraConfig(rank=2, train_attn=False, layers=(0,)))
    assert info.modules == tuple(f"model.layers.0.mlp.{name}" for name in GATED)
    with pytest.raises(InvalidArgument, match=r"model\.layers\.1\.mlp\.experts") as caught:
        engine.create_run("both", LoraConfig(rank=2, train_attn=False))
    assert caught.value.field == "lora.train_mlp"


def test_modules_beside_the_groups_can_be_named_and_routers_cannot(directories):
    engine = make_engine(directories("qwen2_moe"))
    info = engine.create_run("run", LoraConfig(rank=2, target_modules=("shared_expert.down_proj", "q_proj")))
    assert info.modules == tuple(
        f"model.layers.{layer}.{name}"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "mlp.shared_expert.down_proj")
    )
    with pytest.raises(InvalidArgument, match="shared_expert_gate") as caught:
        engine.create_run("router", LoraConfig(rank=2, target_modules=("shared_expert_gate",)))
    assert caught.value.field == "lora.target_modules[0]"


def test_a_name_that_both_groups_have_does_not_bring_in_the_other_group(tmp_path):
    """In GPT-BigCode both groups have a c_proj."""
    directory = make_tiny("gpt_bigcode", tmp_path / "model", n_embd=64, n_layer=2, n_head=2, n_inner=128)
    engine = make_engine(directory)
    info = engine.create_run("run", LoraConfig(rank=2, train_mlp=False))
    assert info.modules == tuple(
        f"transformer.h.{layer}.attn.{name}" for layer in (0, 1) for name in ("c_attn", "c_proj")
    )
    engine.save_adapter("run", tmp_path)
    adapted = PeftModel.from_pretrained(load(directory), tmp_path)
    assert not [name for name, _ in adapted.named_parameters() if "lora_" in name and ".mlp." in name]


def test_a_refused_module_names_those_of_the_base_model_and_nothing_of_other_runs(tmp_path):
    engine = PeftEngine(EngineOptions(str(make_tiny("llama", tmp_path)), "tiny"))
    for run in ("run-of-another-tenant", "head"):
        engine.create_run(run, LoraConfig(rank=2, train_unembed=run == "head"))
    for target in ("nope", "base_layer", "run-of-another-tenant", "lora_A.head"):
        with pytest.raises(InvalidArgument) as caught:
            engine.create_run("run", LoraConfig(rank=2, target_modules=(target,)))
        listed = caught.value.message.removesuffix(".").partition("those are ")[2].split(", ")
        assert set(listed) == {*QKV, "o_proj", *GATED, "lm_head"}
