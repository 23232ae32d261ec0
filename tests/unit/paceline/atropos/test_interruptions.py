"""A step of `paceline atropos` under random refusals, lost calls and kills, over as many processes as it takes."""

from __future__ import annotations

import os
from collections import Counter
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from paceline import errors
from paceline.atropos.options import Options
from paceline.atropos.trainer import AtroposTrainer
from paceline.errors import Fate

PLANS = 300
HARMLESS = 6
"""From this process on, all goes well."""


class Killed(BaseException):
    """The process ends before it has this answer."""


class Future:
    def __init__(self, outcome):
        self._outcome = outcome

    def result(self):
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class Run:
    """The trainer's run: its gradient, and what each step was taken of."""

    def __init__(self):
        self.gradient: list[str] = []
        self.steps: list[list[str]] = []
        self.refused: Counter[str] = Counter()

    @property
    def step(self):
        return len(self.steps)

    def execute(self, name):
        match name:
            case "discard":
                self.gradient = []
            case "step":
                self.steps.append(self.gradient)
                self.gradient = []
            case "publish":
                pass
            case _:
                self.gradient.append(name)


class Client:
    """The run's client in one process, of whose commands a part ends badly."""

    run_id = "run"

    def __init__(self, run, random, share):
        self._run, self._random, self._share = run, random, share
        self._has_gap = False

    def discard_gradient(self):
        return self._send("discard", 0)

    def forward_backward(self, data, loss_fn, config):
        logprobs = np.full(len(data[0].model_input), -1.0)
        output = SimpleNamespace(metrics={"loss:sum": 0.0}, loss_fn_outputs=[{"logprobs": logprobs}])
        return self._send(f"part {data[0].model_input[1]}", output)

    def optim_step(self, params):
        return self._send("step", SimpleNamespace(grad_norm=0.0, learning_rate=0.1, tokens=1))

    def publish_weights(self, **options):
        return self._send("publish", None)

    def _send(self, name, answer):
        if self._has_gap:
            return failed(errors.SeqIdGap("an earlier command did not arrive"), Fate.TURNED_AWAY)
        if self._random.random() >= self._share:
            self._run.execute(name)
            return Future(answer)
        end = self._random.choice(["refused", "turned away", "lost", "answer lost", "killed", "killed before"])
        if end == "refused":
            self._run.refused[name] += 1
            return failed(errors.PoisonedCommand("the engine died each time"), Fate.ANSWERED)
        if end == "turned away":
            return failed(errors.Overloaded("full"), Fate.TURNED_AWAY)
        if end in {"answer lost", "killed"}:
            self._run.execute(name)
        self._has_gap = end != "answer lost"
        return Future(Killed()) if "killed" in end else failed(errors.UpstreamUnavailable("broke"), Fate.UNKNOWN)


def failed(error, fate):
    error.fate = fate
    return Future(error)


def start(run, client, state):
    """Start the command and train one step; return whether it was finished."""
    parts = [[0, number, 1] for number in range(1, 5)]
    group = {
        "tokens": parts,
        "masks": [[-100, *part[1:]] for part in parts],
        "scores": [0.0, 1.0, 2.0, 3.0],
        "inference_logprobs": [[-1.0] * 3 for _ in parts],
    }
    options = Options(
        atropos_url="", state=state, log_dir=None, use_wandb=False, benchmark=False, batch_size=1, seq_len=64,
        clip_eps=0.2, lr=0.1, warmup_steps=0, optimizer="adamw", training_steps=9, vllm_restart_interval=1,
        checkpoint_interval=0,
    )  # fmt: skip
    trainer = AtroposTrainer(options, SimpleNamespace(get_run=lambda run_id: run), lambda line: None)
    trainer.api = SimpleNamespace(next_batch=lambda step, say: [group])
    try:
        trainer.step(client, run.step)
    except (errors.PacelineError, Killed):
        return False
    return True


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_every_part_of_a_batch_is_trained_on_once_before_the_one_step(share, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    for seed in range(PLANS):
        run, random, state = Run(), Random(seed), tmp_path / str(seed)
        processes = 0
        while not start(run, Client(run, random, share if processes < HARMLESS else 0.0), state):
            processes += 1
            assert processes < 2 * HARMLESS, f"seed {seed} is never finished: {run.steps}"
        parts = [part for step in run.steps for part in step]
        missing = {f"part {number}" for number in range(1, 5)}.difference(parts)
        assert len(run.steps) == (1 if parts else 0), f"seed {seed}: {run.steps}"
        assert len(set(parts)) == len(parts), f"seed {seed}: {run.steps}"
        assert missing <= set(run.refused), f"seed {seed}: {run.steps}"
