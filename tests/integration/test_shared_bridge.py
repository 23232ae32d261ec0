"""The bridge `shared` on real processes: sampler and trainer use one copy of the base weights, vLLM's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.engine_cases import train as train_engine
from support.models.engine_cases import warmed, weights
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for

from paceline import AdamParams, Datum, SamplingParams
from paceline.base_model.weight_sharing import read_base
from paceline.errors import BaseMismatch
from paceline.types import LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

PROMPT = list(b"Country: Peru\nCapital:")
PARAMS = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    state = tmp_path_factory.mktemp("shared")
    model = make_tiny_llama(state / "model", tied=True, scaled_rope=True)
    cluster = Cluster.make(state, model, engine="vllm", bridge="shared")
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def base_dir(cluster):
    return Path(cluster.trainer.plan.environment["PACELINE_TRAINER_BASE_DIR"])


@pytest.fixture(scope="module")
def options(cluster, base_dir):
    return EngineOptions(str(cluster.state / "model"), "model", base_dir=str(base_dir))


def publish_and_compare(service, training):
    """Publish, sample from the version, and return the mean |log-probability difference| from the trainer."""
    published = training.publish_weights(wait_for="all").result()
    sampling = service.create_sampling_client(run_id=published.model.run_id, version=published.model.version)
    (sequence,) = sampling.sample(PROMPT, 1, PARAMS).result().sequences
    output = training.forward([Datum.from_completion(PROMPT, sequence.tokens)]).result()
    ours = output.loss_fn_outputs[0]["logprobs"][len(PROMPT) - 1 :]
    return float(np.abs(ours - np.asarray(sequence.logprobs)).mean())


def step(training):
    training.forward_backward([Datum.from_completion(PROMPT, list(b" Lima"))])
    training.optim_step(AdamParams(learning_rate=1e-2)).result()


def engine_maps(cluster):
    """Return the memory map of the trainer's engine."""
    (engine,) = cluster.trainer.engines()
    return Path(f"/proc/{engine}/maps").read_text()


def test_a_run_trains_on_the_sampler_s_weights_and_its_versions_are_sampled(cluster, service, base_dir):
    training = service.create_lora_training_client(rank=8, seed=1)
    for _ in range(2):
        step(training)
        assert publish_and_compare(service, training) <= 1e-5
    assert read_base(base_dir).storages[0].file in engine_maps(cluster)


def test_runs_on_vllm_s_weights_give_the_bits_of_runs_on_weights_of_their_own(options):
    own = PeftEngine(EngineOptions(options.model_path, "model"))
    borrowed = PeftEngine(options)
    for engine in (own, borrowed):
        engine.create_run("run", LoraConfig(rank=4))
    ours, theirs = (train_engine(warmed(engine)) for engine in (own, borrowed))
    for one, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        assert one["logprobs"].tobytes() == other["logprobs"].tobytes()
    assert all(torch.equal(weight, weights(borrowed)[name]) for name, weight in weights(own).items())


def test_another_dtype_than_the_sampler_s_is_refused(options):
    with pytest.raises(BaseMismatch, match="PACELINE_TRAINER_DTYPE"):
        PeftEngine(EngineOptions(options.model_path, "model", dtype="bfloat16", base_dir=options.base_dir))


def test_a_killed_trainer_leaves_the_sampler_serving_and_attaches_again(cluster, service):
    training = service.create_lora_training_client(rank=8, seed=2)
    step(training)
    base = service.create_sampling_client(base_model="model")
    before = base.sample(PROMPT, 1, PARAMS).result().sequences[0]
    cluster.trainer.kill()
    after = base.sample(PROMPT, 1, PARAMS).result().sequences[0]
    assert list(after.tokens) == list(before.tokens)
    cluster.trainer.start()
    assert publish_and_compare(service, training) <= 1e-5


def test_a_killed_sampler_ends_the_engine_which_comes_back_on_the_next_one_s_weights(cluster, service, base_dir):
    training = service.create_lora_training_client(rank=8, seed=3)
    step(training)
    first = read_base(base_dir).generation
    cluster.sampler.kill()
    wait_for(lambda: "lends the base weights is gone" in cluster.trainer.tail(), explain=cluster.trainer.tail)
    waiting = training.forward_backward([Datum.from_completion(PROMPT, list(b" Lima"))])
    cluster.sampler.start()
    waiting.result()
    assert publish_and_compare(service, training) <= 1e-5
    assert read_base(base_dir).generation != first
    assert read_base(base_dir).storages[0].file in engine_maps(cluster)
