"""Inputs and shorthands for tests of the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, make_tiny_llama, make_tiny_qwen2, make_tiny_qwen3

from paceline.errors import NonFiniteGradient
from paceline.types import AdamParams, Datum

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
    return {name: parameter.grad.clone() for name, parameter in engine._runs[run_id].parameters.items()}


def weights(engine, run_id="run"):
    return {name: parameter.detach().clone() for name, parameter in engine._runs[run_id].parameters.items()}


def train(engine, run_id="run", loss="cross_entropy", data=None, config=None):
    return engine.forward_backward(run_id, data or make_data(), loss, config or {}, forward_only=False)


def warmed(engine, run_id="run"):
    """Take a step, so that B is not zero and every weight has a gradient."""
    train(engine, run_id)
    engine.optim_step(run_id, ADAM)
    return engine


def saved(engine, directory, run_id="run"):
    """Bytes of every file that save_state writes into a new directory."""
    directory.mkdir()
    engine.save_state(run_id, directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def check_non_finite_gradient_is_refused(engine, run_id="run"):
    """Check that a step by an infinite gradient is refused and changes no weight."""
    data = make_data((5,))
    data[0].loss_inputs["weights"][-1] = np.inf
    train(engine, run_id, data=data)
    before = weights(engine, run_id)
    with pytest.raises(NonFiniteGradient):
        engine.optim_step(run_id, ADAM)
    torch.testing.assert_close(weights(engine, run_id), before, rtol=0, atol=0)
