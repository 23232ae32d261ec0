"""Sampling means the same through every API, whatever the model's own files set."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import httpx
import numpy as np
import pytest
from support.models.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_llama
from support.stacks.cluster import Cluster
from support.stacks.doors import OF_ENGINE, Doors, Refused

import paceline
from paceline import AdamParams, Datum

pytestmark = pytest.mark.services
PROMPT = list(b"Country: Peru\nCapital:")
CONTEXT = 128
ENDS = [token for token in range(VOCAB_SIZE) if token % 7 == 0] + [EOS_ID]
OWN_DEFAULTS = {
    "do_sample": True,
    "temperature": 0.2,
    "top_k": 3,
    "top_p": 0.3,
    "min_p": 0.4,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(40, 100)],
    "suppress_tokens": list(range(100, 140)),
    "begin_suppress_tokens": list(range(140, 180)),
    "forced_eos_token_id": 5,
    "num_beams": 4,
    "num_return_sequences": 4,
    "max_new_tokens": 3,
    "max_length": 30,
    "min_new_tokens": 2,
    "stop_strings": ["a"],
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "eos_token_id": ENDS,
    "pad_token_id": 0,
}
"""A generation_config.json that sets whatever anything reads from it."""

DOORS = [pytest.param(engine, door, id=f"{engine}-{door}") for engine, doors in OF_ENGINE.items() for door in doors]


@dataclass(frozen=True)
class Deployment:
    """The doors of a deployment, and two runs that are published: one as the base model is, and one that is trained."""

    doors: Doors
    untrained: paceline.TrainingClient
    trained: paceline.TrainingClient


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Return the deployment with an engine; each is started once."""
    folder = tmp_path_factory.mktemp("doors")
    model = make_tiny_llama(folder / "model", context=CONTEXT)
    (model / "generation_config.json").write_text(json.dumps(OWN_DEFAULTS))
    with ExitStack() as stack:

        @cache
        def start(engine):
            cluster = Cluster.make(folder / engine, model, engine=engine)
            stack.enter_context(cluster.running())
            service = stack.enter_context(paceline.ServiceClient(cluster.address, cluster.api_key))
            headers = {"Authorization": f"Bearer {cluster.api_key}", "X-API-Key": cluster.api_key}
            address = "http://" + cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
            http = stack.enter_context(httpx.Client(base_url=address, headers=headers, timeout=120))
            return Deployment(Doors(service, http), *make_runs(service))

        yield start


def make_runs(service):
    made = [service.create_lora_training_client(rank=8, seed=1) for _ in range(2)]
    for _ in range(3):
        made[1].forward_backward([Datum.from_completion(PROMPT, list(b" Lima, and more"))])
        made[1].optim_step(AdamParams(learning_rate=3e-2))
    for run in made:
        run.publish_weights().result()
        run.save_weights_for_sampler("mine").result()
    return made


def differences(run, completions):
    """Return how far the trainer's log-probabilities of all sampled tokens are from those that were told."""
    data = [Datum.from_completion(one.prompt, one.tokens) for one in completions]
    outputs = run.forward(data, "cross_entropy").result().loss_fn_outputs
    parts = [
        output["logprobs"][-len(one.tokens) :] - np.array(one.logprobs)
        for output, one in zip(outputs, completions, strict=True)
    ]
    return np.abs(np.concatenate(parts))


@pytest.mark.parametrize(("engine", "door"), DOORS)
def test_what_a_request_leaves_out_is_neutral_and_logprobs_are_the_trainer_s(deployed, engine, door):
    up = deployed(engine)
    base, trained = up.untrained, up.trained
    for run, name in ((base, "model"), (base, base.run_id), (trained, trained.run_id)):
        if door == "metaclaw" and name == "model":
            continue  # sessions only
        sampled = getattr(up.doors, door)(name, PROMPT, n=16, max_tokens=40)
        assert len(sampled) == 16
        assert differences(run, sampled).max() < 1e-4, name
        # of the model's file only the tokens that end a completion hold
        for one in sampled:
            assert not set(one.tokens[:-1]) & set(ENDS)
            assert one.tokens[-1] in ENDS or len(one.tokens) == 40
        assert sum(one.tokens[-1] in ENDS for one in sampled) > 4
    assert differences(base, sampled).max() > 1e-2


@pytest.mark.parametrize(("engine", "door"), [("vllm", "chat"), ("vllm", "grpc"), ("hf", "grpc")])
def test_an_answer_without_a_limit_fills_the_context(deployed, engine, door):
    (one,) = getattr(deployed(engine).doors, door)("model", PROMPT, ignore_eos=True)
    assert len(one.prompt) + len(one.tokens) == CONTEXT


SIGNED = ("tinker", "completions", "generate")


@pytest.mark.parametrize(
    "asked", [{"seed": 7}, {"seed": 2**63 + 5, "temperature": 0.7, "top_k": 40}, {"temperature": 0}]
)
def test_the_same_request_samples_the_same_tokens_through_every_door(deployed, asked):
    told = {}
    for door in ("grpc", "stream", "tinker", "completions", "generate"):
        ask = getattr(deployed("vllm").doors, door)
        told[door] = [one.tokens for one in ask("model", PROMPT, n=3, max_tokens=12, ignore_eos=True, **asked)]
    assert all(tokens == told["grpc"] for tokens in told.values()), told
    assert len({tuple(tokens) for tokens in told["grpc"]}) == (1 if asked == {"temperature": 0} else 3)


def test_a_negative_seed_is_the_same_one_at_every_door_that_takes_signed_seeds(deployed):
    doors, asked = deployed("vllm").doors, {"n": 2, "max_tokens": 12, "ignore_eos": True}
    told = {name: getattr(doors, name)("model", PROMPT, seed=-1, **asked) for name in SIGNED}
    told["grpc"] = doors.grpc("model", PROMPT, seed=2**64 - 1, **asked)
    tokens = {name: [one.tokens for one in samples] for name, samples in told.items()}
    assert all(each == tokens["grpc"] for each in tokens.values()), tokens


BEYOND = [
    ({"n": 0}, ("n", "num_samples")),
    ({"n": 257}, ("n", "num_samples")),
    ({"temperature": -0.5}, ("temperature",)),
    ({"temperature": 0.005}, ("temperature",)),
    ({"temperature": 2.5}, ("temperature",)),
    ({"top_p": 0.0}, ("top_p",)),
    ({"top_p": 1.5}, ("top_p",)),
    ({"top_k": -2}, ("top_k",)),
    ({"top_k": VOCAB_SIZE + 1}, ("top_k",)),
    ({"min_p": -0.5}, ("min_p",)),
    ({"min_p": 1.5}, ("min_p",)),
    ({"seed": -(2**63) - 1}, ("seed",)),
    ({"seed": 2**64}, ("seed",)),
    ({"max_tokens": 0}, ("max_tokens", "max_completion_tokens")),
    ({"max_tokens": CONTEXT}, ("max_tokens", "max_completion_tokens")),
    ({"min_tokens": CONTEXT}, ("min_tokens",)),
    ({"stop": ["x" * 1025]}, ("stop",)),
    ({"stop": [""]}, ("stop",)),
    ({"stop": ["x"] * 65}, ("stop",)),
    ({"stop_token_ids": [VOCAB_SIZE]}, ("stop_token_ids", "stop")),
    ({"stop_token_ids": [1] * 65}, ("stop_token_ids", "stop")),
    ({"topk_logprobs": 21}, ("topk_logprobs", "topk_sample_logprobs", "logprobs", "top_logprobs")),
    ({"topk_prompt_logprobs": 21}, ("topk_prompt_logprobs", "prompt_logprobs")),
]
"""Beyond the limits of a sampler -> the names that APIs have for the field."""


@pytest.mark.parametrize(("engine", "door"), DOORS)
def test_every_limit_holds_at_every_door(deployed, engine, door):
    up, is_http, wrong = deployed(engine), door not in {"grpc", "stream"}, {}
    for asked, names in BEYOND:
        if asked == {"n": 0} and not is_http:
            continue  # 0 means 1 in the contract
        try:
            getattr(up.doors, door)(up.untrained.run_id, PROMPT, **asked)
        except Refused as refusal:
            told = str(refusal)
            # only the contract has a field `params`
            if not any(name in told for name in names) or (is_http and re.search(r"(?<!sampling_)params\.", told)):
                wrong[str(asked)[:60]] = told
        except TypeError:
            assert not is_http  # the client has no such argument, and its call no such field
        else:
            wrong[str(asked)[:60]] = "accepted"
    assert not wrong
