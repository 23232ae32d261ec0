"""Inputs and shorthands for tests of the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from paceline.errors import NonFiniteGradient
from paceline.types import AdamParams, Datum, ForwardBackwardSpec
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama, make_tiny_qwen2, make_tiny_qwen3

MAKERS = {"llama": make_tiny_llama, "qwen2": make_tiny_qwen2, "qwen3": make_tiny_qwen3}
ADAM = AdamParams(learning_rate=1e-2)


def make_data(lengths=(5, 17, 9, 30), seed=0, *, masked=True):
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        inputs = {
            "target_tokens": rng.integers(0, VOCAB_SIZE, length),
            "weights": rng.normal(1, 1, length).astype(np.float32),
            "logprobs": -rng.uniform(3, 7, length).astype(np.float32),
            "advantages": rng.normal(0, 1, length).astype(np.float32),
        }
        if masked:
            inputs["mask"] = (np.arange(length) >= length // 2).astype(np.uint8)
        data.append(Datum(rng.integers(0, VOCAB_SIZE, length).astype(np.int32), inputs))
    return data


def gradients(engine, run_id="run"):
    return {name: parameter.grad.clone() for name, parameter in engine.runs[run_id].parameters.items()}


def weights(engine, run_id="run"):
    return {name: parameter.detach().clone() for name, parameter in engine.runs[run_id].parameters.items()}


def train(engine, run_id="run", loss="cross_entropy", data=None, config=None):
    return engine.forward_backward(run_id, data or make_data(), ForwardBackwardSpec(loss, config or {}))


def warmed(engine, run_id="run"):
    """Take a step, so that B is not zero and every weight has a gradient."""
    train(engine, run_id)
    engine.optim_step(run_id, ADAM)
    return engine


def lora_gradients(directory, state, data):
    """Return loss and gradients of cross entropy by stock transformers and PEFT in float64, one datum at a time.

    `state` holds a run's weights; the run's LoRA configuration is that of `LoraConfig(rank=4)`.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, PeftLoraConfig(r=4, lora_alpha=8, target_modules=targets)).double().eval()
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.data.copy_(state[name])
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        tokens = torch.from_numpy(datum.model_input.astype(np.int64))
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        lp = model(input_ids=tokens[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        total = total - (lp * torch.from_numpy(datum.loss_fn_inputs["weights"] * datum.loss_fn_inputs["mask"])).sum()
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in trained.items()}


def saved(engine, directory, run_id="run"):
    """Return the bytes of every file that save_state writes into a new directory."""
    directory.mkdir()
    engine.save_state(run_id, directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def check_non_finite_gradient_is_refused(engine, run_id="run"):
    """Check that a step with an infinite gradient is refused and changes no weight."""
    data = make_data((5,))
    data[0].loss_fn_inputs["weights"][-1] = np.inf
    train(engine, run_id, data=data)
    before = weights(engine, run_id)
    with pytest.raises(NonFiniteGradient):
        engine.optim_step(run_id, ADAM)
    torch.testing.assert_close(weights(engine, run_id), before, rtol=0, atol=0)
