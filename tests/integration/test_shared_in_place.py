"""A full-parameter run writes its versions into vLLM's weights: between two decode steps, or during decoding."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.tiny_models import make_tiny_qwen2
from support.stacks.cluster import Cluster
from transformers import AutoModelForCausalLM

from paceline import AdamParams, Datum, SamplingParams, errors
from paceline.base_model.weight_sharing import WriteRequest, read_base, write_turn
from paceline.layout import Volume

pytestmark = pytest.mark.services

PROMPT = list(b"Country: Peru\nCapital:")
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
FAR = 1e-2
"""Least mean |log-probability difference| between different versions; of a version and itself it is 1e-5."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    state = tmp_path_factory.mktemp("in_place")
    model = make_tiny_qwen2(state / "model", tied=False)
    settings = {"PACELINE_SAMPLER_IN_PLACE": "paused", "PACELINE_TRAINER_KEEP_VERSIONS": "1000"}
    cluster = Cluster.make(state, model, engine="vllm", bridge="shared", **settings)
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def base_dir(cluster):
    return Path(cluster.sampler.plan.environment["PACELINE_SAMPLER_BASE_DIR"])


@pytest.fixture(scope="module")
def runs():
    """A dict with the id of the run whose weights the sampler has, once the first test has created that run."""
    return {}


@pytest.fixture
def training(service, runs):
    if "id" not in runs:
        runs["id"] = service.create_full_training_client(seed=3).run_id
    return service.get_training_client(runs["id"])


@pytest.fixture
def newest(service, training):
    return service.create_sampling_client(run_id=training.run_id)


@pytest.fixture
def score(cluster, training):
    """Scores sampled tokens: stock transformers' log-probabilities with a version from the volume."""

    @cache
    def model(version):
        directory = Volume(cluster.state / "checkpoints").version(training.run_id, version)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(version, tokens):
        sequence = torch.tensor([[*PROMPT, *map(int, tokens)]])
        rows = model(version)(sequence).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
        return rows.gather(1, sequence[0, len(PROMPT) :, None])[:, 0].numpy()

    return logprobs


def publish(training):
    training.forward_backward([Datum.from_completion(PROMPT, list(b" Lima"))])
    # Small, so that hundreds of versions make neither the logits nor, with them, fp32's rounding errors larger.
    training.optim_step(AdamParams(learning_rate=2e-3)).result()
    return training.publish_weights(wait_for="all").result().model


def spans(sequence):
    """Return each span of a completion: version, whether it is mixed, and the slice of its tokens."""
    starts = [span.start for span in sequence.version_spans]
    ends = [*starts[1:], len(sequence.tokens)]
    return [
        (span.version, span.mixed, slice(start, end))
        for span, start, end in zip(sequence.version_spans, starts, ends, strict=True)
    ]


def sample_while_publishing(newest, training):
    """Sample long completions, publishing versions until they are done."""
    publish(training)
    waiting = newest.sample(PROMPT, 4, LONG)
    while not waiting.done():
        publish(training)
    return waiting.result().sequences


def test_the_base_model_is_served_until_a_run_writes_its_first_version(cluster, service, training, newest, score):
    cluster.agreements(least=1)  # on the base model, which is gone once a version is written
    base = service.create_sampling_client(base_model="model")
    stream = iter(base.sample_stream(PROMPT, sampling_params=LONG))
    deltas = [next(stream)]
    published = publish(training)
    deltas += stream
    assert sum(len(delta.tokens) for delta in deltas) == 400
    assert [(span.version, span.start) for span in deltas[-1].version_spans] == [(0, 0)]
    result = newest.sample(PROMPT, 1, SHORT).result()
    assert result.model == published
    (sequence,) = result.sequences
    assert spans(sequence) == [(published.version, False, slice(0, 8))]
    assert np.abs(score(published.version, sequence.tokens) - sequence.logprobs).mean() <= 1e-5
    with pytest.raises(errors.ModelNotFound):
        base.sample(PROMPT, 1, SHORT).result()
    _, version = cluster.agreements(training.run_id)
    assert (version.model.run_id, version.model.version) == (training.run_id, published.version)
    assert 0 < version.mean_difference < version.bound < 1e-3


def test_a_version_that_was_written_over_is_gone_and_cached_prefixes_with_it(service, training, score):
    old = publish(training)
    prompt = PROMPT * 4  # several blocks of the cache
    before = service.create_sampling_client(run_id=old.run_id, version=old.version)
    once = before.compute_logprobs(prompt).result()
    new = publish(training)
    with pytest.raises(errors.VersionNotFound):
        before.sample(prompt, 1, SHORT).result()
    after = service.create_sampling_client(run_id=new.run_id, version=new.version)
    (sequence,) = after.sample(prompt, 1, replace(SHORT, max_tokens=1)).result().sequences
    again = after.compute_logprobs([*prompt, *sequence.tokens]).result()
    assert again.model == new
    assert abs(again.logprobs[-1] - sequence.logprobs[0]) <= 1e-4
    assert np.abs(again.logprobs[1:-1] - once.logprobs[1:]).mean() > FAR


def test_every_token_of_a_completion_is_of_the_one_version_that_its_span_names(newest, training, score):
    changed = 0
    for sequence in sample_while_publishing(newest, training):
        assert len(sequence.tokens) == 400
        assert spans(sequence)[0][2].start == 0
        versions = [version for version, _, _ in spans(sequence)]
        assert versions == sorted(set(versions))
        changed += len(versions) - 1
        expected = np.concatenate([score(version, sequence.tokens)[where] for version, _, where in spans(sequence)])
        difference = np.abs(expected - sequence.logprobs)
        assert difference.mean() <= 1e-5
        assert difference.max() <= 1e-4
        for version, mixed, where in spans(sequence):
            assert not mixed
            if where.stop - where.start >= 5:  # with fewer, one token's rounding error dominates the mean
                assert difference[where].mean() <= 1e-5
            if version > 3 and where.stop - where.start > 20:
                assert np.abs(score(1, sequence.tokens) - sequence.logprobs)[where].mean() > FAR
    assert changed


def test_a_stream_says_at_its_end_which_version_each_token_is_of(newest, training):
    published, tokens, last = publish(training), [], None
    for delta in newest.sample_stream(PROMPT, sampling_params=SHORT):
        tokens += delta.tokens
        last = delta
    assert [(span.version, span.start) for span in last.version_spans] == [(published.version, 0)]
    assert len(tokens) == 8


def test_a_write_that_is_broken_off_is_never_sampled_from(training, newest, base_dir, score):
    current = publish(training)
    request = WriteRequest(read_base(base_dir).generation, current.run_id, current.version + 1, "default")
    with pytest.raises(RuntimeError), write_turn(base_dir, request):
        raise RuntimeError("the writer dies")
    waiting = newest.sample(PROMPT, 1, SHORT)
    healed = publish(training)
    result = waiting.result()
    assert result.model.version == healed.version
    (sequence,) = result.sequences
    assert np.abs(score(healed.version, sequence.tokens) - sequence.logprobs).mean() <= 1e-5


def test_another_run_s_versions_and_adapters_are_refused(service, training, base_dir):
    publish(training)
    other = service.create_full_training_client(seed=4)
    with pytest.raises(errors.Unsupported):
        publish(other)
    adapter = service.create_lora_training_client(rank=4)
    with pytest.raises(errors.NotServable, match="no adapters: train all parameters"):
        adapter.publish_weights(wait_for="all").result()
    request = WriteRequest("of weights before", training.run_id, 99, "default")
    with pytest.raises(errors.BaseUnavailable), write_turn(base_dir, request):
        pass


@contextmanager
def restarted(cluster, **environment):
    sampler, plan = cluster.sampler, cluster.sampler.plan
    sampler.kill()
    sampler.plan = replace(plan, environment={**plan.environment, **environment})
    sampler.start()
    yield
    sampler.plan = plan


def test_a_restarted_sampler_takes_the_newest_version_from_the_volume_and_hogwild_marks_tokens(
    cluster, training, newest, score, base_dir
):
    published = publish(training)
    with restarted(cluster, PACELINE_SAMPLER_IN_PLACE="hogwild"):
        result = newest.sample(PROMPT, 1, SHORT).result()
        assert result.model == published
        (sequence,) = result.sequences
        assert np.abs(score(published.version, sequence.tokens) - sequence.logprobs).mean() <= 1e-5
        seen = [span for one in sample_while_publishing(newest, training) for span in spans(one)]
        assert len({version for version, _, _ in seen}) > 1
        (sequence,) = newest.sample(PROMPT, 1, SHORT).result().sequences
        ((version, mixed, _),) = spans(sequence)
        assert not mixed
        assert np.abs(score(version, sequence.tokens) - sequence.logprobs).mean() <= 1e-5
        assert mixed_in_the_middle(newest, base_dir, training.run_id, version)


def mixed_in_the_middle(newest, base_dir, run_id, version):
    """Hold a write open while a stream continues; return whether its spans show it."""
    stream, seen = iter(newest.sample_stream(PROMPT, sampling_params=LONG)), 0
    next(stream)
    with write_turn(base_dir, WriteRequest(read_base(base_dir).generation, run_id, version + 1, "default")):
        while seen < 200:
            seen += len(next(stream).tokens)
    *_, last = stream
    spans = [(span.version, span.mixed) for span in last.version_spans]
    return spans == [(version, False), (version + 1, True), (version + 1, False)]
