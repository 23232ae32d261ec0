"""The main job through the gateway, on real processes, with vLLM as the sampler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.descendants import descendants
from support.doc_pages import page, section
from support.learnable_loop import copy_learnable_loop
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.cluster import Cluster

from paceline import AdamParams, Datum, SamplingParams, errors
from paceline.recipes.runs import CannotContinue, attach

ROOT = Path(__file__).resolve().parents[2]
PARITY = 1e-5
"""Bound of the mean |log-probability difference| between trainer and sampler, both in float32."""
PROMPT = list(b"Country: Peru\nCapital:")
PARAMS = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)

pytestmark = pytest.mark.services


@pytest.fixture(scope="module", params=["stream", "volume"])
def cluster(request, tmp_path_factory):
    state = tmp_path_factory.mktemp("main_job")
    cluster = Cluster.make(state, make_tiny_llama(state / "model"), engine="vllm", bridge=request.param)
    with cluster.running():
        yield cluster


@pytest.fixture
def training(service):
    return service.create_lora_training_client(rank=8, seed=1)


def at(service, model):
    return service.create_sampling_client(run_id=model.run_id, version=model.version)


def train(training, completion=b" Lima", steps=1):
    data = [Datum.from_completion(PROMPT, list(completion))]
    for _ in range(steps):
        training.forward_backward(data)
        update = training.optim_step(AdamParams(learning_rate=1e-2))
    return update.result()


def trainer_logprobs(training, completion):
    output = training.forward([Datum.from_completion(PROMPT, completion)]).result()
    return output.loss_fn_outputs[0]["logprobs"][len(PROMPT) - 1 :]


def mean_difference(one, other):
    return float(np.abs(np.asarray(one) - np.asarray(other)).mean())


def test_a_sample_comes_provably_from_the_version_that_it_names(service, training):
    old = training.publish_weights(wait_for="all").result()
    before = at(service, old.model).sample(PROMPT, 1, PARAMS).result()
    train(training, steps=3)
    new = training.publish_weights(wait_for="all").result()
    after = at(service, new.model).sample(PROMPT, 4, PARAMS).result()
    assert after.model == new.model != before.model == old.model
    assert [ack.blake3 for ack in new.acknowledgements] == [new.model.blake3]
    for sequence in after.sequences:
        ours = trainer_logprobs(training, sequence.tokens)
        assert mean_difference(ours, sequence.logprobs) <= PARITY
        stale = at(service, old.model).compute_logprobs([*PROMPT, *sequence.tokens]).result()
        assert stale.model == old.model
        assert mean_difference(ours, stale.logprobs[len(PROMPT) :]) > 100 * PARITY


def test_trainer_and_sampler_show_how_closely_they_agree(cluster, training):
    """Compare vLLM with the trainer on random tokens: base model and version agree within float32 error."""
    train(training)
    training.publish_weights(wait_for="all").result()
    for agreement in cluster.agreements():
        assert agreement.tokens == 255
        assert 0 < agreement.mean_difference < agreement.bound < 1e-3
        assert not agreement.refusal


def test_the_main_job_raises_the_reward(service, training):
    """The reward is the share of completions whose first byte is below 64, such as a digit or punctuation."""
    rewards = []
    for _ in range(20):
        published = training.publish_weights(wait_for="all").result()
        result = at(service, published.model).sample(PROMPT, 32, SamplingParams(max_tokens=1)).result()
        reward = np.array([float(sequence.tokens[0] < 64) for sequence in result.sequences])
        rewards.append(reward.mean())
        data = [
            Datum.from_completion(PROMPT, sequence.tokens, logprobs=sequence.logprobs, advantages=advantage)
            for sequence, advantage in zip(result.sequences, reward - reward.mean(), strict=True)
        ]
        training.forward_backward(data, "importance_sampling")
        training.optim_step(AdamParams(learning_rate=2e-3)).result()
    assert np.mean(rewards[-5:]) - np.mean(rewards[:5]) > 0.3


def test_tokens_stream_while_the_run_trains_and_publishes(service, training):
    published = training.publish_weights(wait_for="all").result()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    seen = 0
    for delta in at(service, published.model).sample_stream(PROMPT, sampling_params=params):
        assert delta.model == published.model
        if seen == 0:
            train(training)
            assert training.publish_weights(wait_for="all").result().model.version == published.model.version + 1
        seen += len(delta.tokens)
    assert seen == 200


def test_a_checkpoint_for_the_sampler_is_sampled_by_its_path(service, training):
    train(training, steps=2)
    checkpoint = training.save_weights_for_sampler("final").result()
    result = service.create_sampling_client(checkpoint.path).sample(PROMPT, 1, PARAMS).result()
    assert (result.model.checkpoint, result.model.blake3) == (checkpoint.path, checkpoint.blake3)
    sequence = result.sequences[0]
    assert mean_difference(trainer_logprobs(training, sequence.tokens), sequence.logprobs) <= PARITY


def test_what_does_not_exist_is_never_answered_from_other_weights(service, training):
    published = training.publish_weights().result()
    absent = {
        errors.VersionNotFound: {"run_id": training.run_id, "version": published.model.version + 1},
        errors.RunNotFound: {"run_id": training.run_id[:-4] + "0000"},
        errors.CheckpointNotFound: {"model_path": f"paceline://{training.run_id}/sampler/none"},
    }
    for error, model in absent.items():
        with pytest.raises(error):
            service.create_sampling_client(**model).sample(PROMPT, 1, PARAMS).result()


def test_a_rank_above_the_samplers_is_refused_when_the_run_is_made(service):
    with pytest.raises(errors.RankTooLarge) as caught:
        service.create_lora_training_client(rank=17)
    assert caught.value.field == "lora.rank"


def test_a_killed_sampler_comes_back_with_the_version_and_the_client_goes_on(cluster, service, training):
    train(training)
    published = training.publish_weights(wait_for="all").result()
    sampling = at(service, published.model)
    before = sampling.sample(PROMPT, 1, PARAMS).result()
    (engine,) = descendants("EngineCore", cluster.sampler.process.pid)
    assert engine.parent() == descendants("ForkServer", cluster.sampler.process.pid)[0]
    cluster.sampler.process.kill()
    engine.wait(60)  # only the kernel is left to end it
    cluster.sampler.process.wait()
    pending = sampling.sample(PROMPT, 1, PARAMS)
    train(training)
    cluster.sampler.start()
    after = pending.result(timeout=PATIENCE)
    assert after.model == before.model
    np.testing.assert_array_equal(after.sequences[0].tokens, before.sequences[0].tokens)
    newest = training.publish_weights(wait_for="all").result()
    assert at(service, newest.model).sample(PROMPT, 1, PARAMS).result().model == newest.model


def test_a_killed_gateway_costs_the_client_a_delay_and_the_services_nothing(cluster, service, training):
    step = train(training).step
    cluster.gateway.kill()
    data = [Datum.from_completion(PROMPT, list(b" Lima"))]
    loss = training.forward_backward(data)
    update = training.optim_step(AdamParams())
    cluster.gateway.start()
    assert loss.result(timeout=PATIENCE).metrics["tokens:sum"] == 5
    assert update.result(timeout=PATIENCE).step == step + 1
    published = training.publish_weights(wait_for="all").result()
    assert at(service, published.model).sample(PROMPT, 1, PARAMS).result().model == published.model


def test_a_killed_trainer_costs_the_client_a_delay_and_the_run_nothing(cluster, service, training):
    twin = service.create_lora_training_client(rank=8, seed=1)
    straight = train(twin, steps=3)
    train(training, steps=2)
    published = training.publish_weights(wait_for="all").result()
    cluster.trainer.kill()
    still = at(service, published.model).sample(PROMPT, 1, PARAMS).result()
    assert still.model == published.model
    data = [Datum.from_completion(PROMPT, list(b" Lima"))]
    training.forward_backward(data)
    update = training.optim_step(AdamParams(learning_rate=1e-2))
    cluster.trainer.start()
    resumed = update.result(timeout=PATIENCE)
    assert (resumed.step, resumed.grad_norm) == (straight.step, straight.grad_norm)
    newest = training.publish_weights(wait_for="all").result()
    assert newest.model.version > published.model.version
    assert at(service, newest.model).sample(PROMPT, 1, PARAMS).result().model == newest.model


# Client programs do not depend on the bridge and take seconds to import their tokenizer, so one bridge is enough.
stream_alone = pytest.mark.parametrize("cluster", ["stream"], indirect=True)


@stream_alone
@pytest.mark.parametrize(
    ("example", "arguments", "last_line"),
    [
        (
            "rl_loop.py",
            ["--steps", "2", "--prompts", "2", "--samples", "2", "--rank", "4"],
            r"step 1 of 2: reward .*\nstep 2 of 2: reward .*, version 2, (?s:.*)reward curve",
        ),
        ("sft_loop.py", ["--steps", "2"], "version 1"),
        ("stream_tokens.py", ["--max-tokens", "4"], "4 tokens in .* ended by length|[1-4] tokens in .* ended by stop"),
        (
            "raw_stubs.py",
            [],
            r"from version 1\nattachment 1; commands left .*: 0\n(?s:.*)command 5 succeeded: optim_step\n"
            r"(?s:.*)command 6 succeeded: optim_step\n$",
        ),
    ],
)
def test_the_examples_run(forked_engines, cluster, tmp_path, example, arguments, last_line):
    script = ROOT / "examples" / example
    if example == "rl_loop.py":
        script, arguments = copy_learnable_loop(tmp_path), [*arguments, "--out", str(tmp_path)]
    assert re.search(last_line, run_python(cluster, tmp_path, str(script), *arguments))


@stream_alone
def test_a_loop_ends_when_there_is_nothing_to_learn(forked_engines, cluster, tmp_path):
    """The random model names no capital."""
    arguments = ["--prompts", "1", "--samples", "2", "--rank", "4", "--out", str(tmp_path)]
    written = run_python(cluster, tmp_path, str(ROOT / "examples" / "rl_loop.py"), *arguments)
    assert re.match(r"nothing is left to learn: .*(?s:.*)before 0.000, after 0.000", written)


def test_the_example_without_the_client_names_the_variable_that_is_missing():
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_API_KEY"}
    example = str(ROOT / "examples" / "raw_stubs.py")
    done = subprocess.run(
        [sys.executable, example], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("PACELINE_API_KEY is not set; .*\n", done.stderr)


@stream_alone
def test_the_readmes_ten_lines_run_as_printed(cluster, tmp_path):
    _, _, rest = (ROOT / "README.md").read_text().partition("```python\n")
    lines, _, _ = rest.partition("```")
    assert "from version 1" in run_python(cluster, tmp_path, "-c", lines)


STUBS = """
import os, uuid
import grpc
from paceline.trainer.v1 import trainer_service_pb2 as trainer
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types.v1 import lora_pb2
training = TrainerServiceStub(grpc.insecure_channel(os.environ["PACELINE_ADDRESS"]))
key = (("authorization", "Bearer " + os.environ["PACELINE_API_KEY"]),)
made = trainer.CreateRunRequest(request_id=uuid.uuid4().hex, lora=lora_pb2.LoraConfig(rank=2))
run_id = training.CreateRun(made, metadata=key).run.run_id
"""


@stream_alone
def test_the_lines_of_the_contracts_page_run_as_printed(cluster, tmp_path):
    lines = re.findall("```python\n(.*?)```", section(page("contracts.md"), "With stubs alone"), re.DOTALL)
    written = run_python(cluster, tmp_path, "-c", STUBS + "".join(lines))
    assert re.fullmatch(r"1 COMMAND_STATE_\w+\n0 positions dropped\n", written)


def run_python(cluster, directory, *arguments):
    """Run a client program as a user would; return its stdout."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PACELINE_ADDRESS": cluster.address, "PACELINE_API_KEY": cluster.api_key},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_example_does_not_continue_a_run_under_other_settings(service):
    made = service.create_lora_training_client(rank=1, user_metadata={"name": "mine", "settings": "rank 1"})
    assert attach(service, "mine", "rank 1", print).run_id == made.run_id
    with pytest.raises(CannotContinue, match="was made with rank 1, not rank 2; give the same, or another --name"):
        attach(service, "mine", "rank 2", print)
    assert attach(service, "another", "rank 2", print) is None
    service.delete_run(made.run_id)
