"""Full-parameter runs through the gateway, on real processes, and a sampler started from a run's checkpoint."""

from contextlib import contextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest
from support.descendants import descendants
from support.models.tiny_models import make_tiny_llama
from support.ports import free_port
from support.stacks.cluster import Cluster, wait_for

from paceline import AdamParams, Datum, FullParameters, SamplingParams, WeightStorage, codec, errors
from paceline.layout import MODEL_FILE, CheckpointPath, Volume
from paceline.rpc.identity import peer_metadata
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.types import ModelRef

pytestmark = pytest.mark.services

PROMPT, COMPLETION = list(b"Country: Peru\nCapital:"), list(b" Lima")
DATA = [Datum.from_completion(PROMPT, COMPLETION)]
ADAM = AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    state = tmp_path_factory.mktemp("full")
    cluster = Cluster.make(
        state, make_tiny_llama(state / "model", tied=True), engine="vllm", PACELINE_TRAINER_SNAPSHOT_COMMANDS="5"
    )
    with cluster.running(cluster.trainer, cluster.gateway):
        yield cluster


@contextmanager
def sampler_of(cluster, **environment):
    """Run the cluster's sampler with these settings added."""
    sampler, plan = cluster.sampler, cluster.sampler.plan
    sampler.plan = replace(plan, environment={**plan.environment, **environment})
    sampler.start()
    try:
        yield
    finally:
        sampler.plan = plan
        sampler.stop()


def at(service, model):
    return service.create_sampling_client(run_id=model.run_id, version=model.version)


def train(training, steps):
    for _ in range(steps):
        training.forward_backward(DATA)
        update = training.optim_step(ADAM)
    return update.result()


def logprobs(training):
    return training.forward(DATA).result().loss_fn_outputs[0]["logprobs"][-len(COMPLETION) :]


def weights_of(training, name):
    return training.save_weights_for_sampler(name).result().sha256


@pytest.mark.parametrize("storage", WeightStorage)
def test_a_run_comes_back_bit_for_bit_after_its_engine_and_its_trainer_were_killed(cluster, service, storage):
    straight, training = (service.create_full_training_client(storage=storage, seed=3) for _ in range(2))
    assert training.get_info().parameters == FullParameters(storage, 3)
    train(straight, 7)
    train(training, 4)
    cluster.trainer.kill_engine()
    train(training, 2)
    cluster.trainer.kill()
    cluster.trainer.start()
    assert train(training, 1).step == 7
    assert weights_of(training, "end") == weights_of(straight, "end")


def test_a_state_checkpoint_resumes_in_a_run_made_from_it(service):
    training = service.create_full_training_client(user_metadata={"a": "b"})
    train(training, 2)
    path = training.save_state("two").result().path
    train(training, 1)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    info = resumed.get_info()
    assert (info.parameters, info.user_metadata, info.step) == (FullParameters(), {"a": "b"}, 2)
    train(resumed, 1)
    assert weights_of(resumed, "three") == weights_of(training, "three")


def test_a_published_model_is_served_by_a_sampler_that_builds_its_engine_again(cluster, service):
    training = service.create_full_training_client()
    with sampler_of(cluster, PACELINE_SAMPLER_BRIDGE="restart"):
        base = service.create_sampling_client().compute_logprobs(PROMPT + COMPLETION).result()
        for steps in (1, 2):
            train(training, steps)
            published = training.publish_weights(wait_for="any").result()
            reached = at(service, published.model).compute_logprobs(PROMPT + COMPLETION).result()
            assert reached.model == published.model
            np.testing.assert_allclose(reached.logprobs[-len(COMPLETION) :], logprobs(training), atol=1e-4)
            assert np.abs(reached.logprobs - base.logprobs)[1:].max() > 0.01
        checkpoint = training.save_weights_for_sampler("served").result()
        saved = service.create_sampling_client(checkpoint.path).compute_logprobs(PROMPT + COMPLETION).result()
        np.testing.assert_array_equal(saved.logprobs, reached.logprobs)
        assert saved.model.checkpoint == checkpoint.path


def assert_served(service, training, model):
    reached = at(service, model).compute_logprobs(PROMPT + COMPLETION).result()
    assert reached.model == model
    assert np.abs(reached.logprobs[-len(COMPLETION) :] - logprobs(training)).mean() <= 1e-5


def test_a_broadcast_model_is_written_into_the_running_engine(cluster, service, tmp_path):
    training = service.create_full_training_client()
    bridge = {"PACELINE_SAMPLER_BRIDGE": "collective", "PACELINE_SAMPLER_SERVES": "models"}
    with sampler_of(cluster, **bridge, PACELINE_SAMPLER_STAGING_DIR=str(tmp_path)):
        wait_for(lambda: "group formed" in cluster.trainer.log.read_text(), explain=cluster.trainer.tail)
        cluster.trainer.log.write_text("")
        engine = descendants("EngineCore", cluster.sampler.process.pid)
        base = service.create_sampling_client().compute_logprobs(PROMPT + COMPLETION).result().logprobs
        train(training, 1)
        first = training.publish_weights(wait_for="any").result().model
        assert_served(service, training, first)
        base_model, version = cluster.agreements(training.run_id)
        assert (base_model.model.version, version.model) == (0, codec.served_model_to_proto(replace(first, blake3="")))
        assert 0 < version.mean_difference < version.bound < 1e-3

        params = SamplingParams(max_tokens=200, ignore_eos=True)
        stream = at(service, first).sample_stream(PROMPT, sampling_params=params)
        deltas = iter(stream)
        next(deltas)
        train(training, 2)
        publishing = training.publish_weights(wait_for="any")
        assert {delta.model for delta in deltas} == {first}, "what is in flight ends on its version"
        assert_served(service, training, publishing.result().model)
        assert "FetchVersion" not in cluster.trainer.log.read_text(), "the bytes came over the group"

        for member in descendants("paceline.collective.member", cluster.sampler.process.pid):
            member.kill()
        train(training, 1)
        assert_served(service, training, training.publish_weights(wait_for="any").result().model)
        assert "FetchVersion" in cluster.trainer.log.read_text(), "what the group loses is fetched"

        again = service.create_sampling_client().compute_logprobs(PROMPT + COMPLETION).result().logprobs
        np.testing.assert_array_equal(again, base)
        assert engine
        assert descendants("EngineCore", cluster.sampler.process.pid) == engine, "the engine was never built again"
        wait_for(lambda: not [*tmp_path.rglob(MODEL_FILE)])
        with pytest.raises(errors.NotServable, match="no adapters: train all parameters"):
            service.create_lora_training_client(rank=4).publish_weights(wait_for="any").result()


def test_bad_parameters_are_refused_and_make_no_run(service):
    before = len(service.list_runs())
    with pytest.raises(errors.InvalidArgument):
        service.create_full_training_client(seed=-1)
    with pytest.raises(errors.ModelNotFound):
        service.create_full_training_client("another")
    assert len(service.list_runs()) == before


def test_a_loss_that_overflows_is_counted_and_refused_where_that_was_asked_for(service):
    training = service.create_lora_training_client(rank=4)
    huge = [Datum.from_completion(PROMPT, COMPLETION, weight=3e38)]
    training.forward_backward(DATA).result()
    with pytest.raises(errors.NonFiniteLoss) as caught:
        training.forward_backward(huge, refuse_non_finite=True).result()
    assert int(caught.value.metadata["positions"]) > 0
    assert training.optim_step(ADAM).result().step == 1, "the gradient before it stays"
    metrics = training.forward_backward(huge).result().metrics
    assert metrics["nonfinite:sum"] > 0
    with pytest.raises(errors.NonFiniteGradient):
        training.optim_step(ADAM).result()


def test_a_sampler_started_from_a_checkpoint_computes_what_was_trained(cluster, service):
    training = service.create_full_training_client()
    untrained = logprobs(training)
    train(training, 3)
    checkpoint = training.save_weights_for_sampler("model").result()
    directory = Volume(cluster.state / "checkpoints").checkpoint(CheckpointPath.parse(checkpoint.path))
    own = {"MODEL": str(directory), "MODEL_NAME": "trained", "TRAINER": f"127.0.0.1:{free_port()}"}
    # The sampler's base weights differ from the trainer's, so it follows no trainer, and a gateway of this trainer's
    # sends it nothing.
    with sampler_of(cluster, **{f"PACELINE_SAMPLER_{name}": value for name, value in own.items()}):
        request = sampler_pb.ComputeLogprobsRequest(
            model=codec.model_ref_to_proto(ModelRef(base="trained")),
            tokens=codec.tensor_to_proto(np.array(PROMPT + COMPLETION, np.int32)),
        )
        credential = (cluster.state / "credential").read_text()
        with grpc.insecure_channel(cluster.sampler.plan.environment["PACELINE_SAMPLER_LISTEN"]) as channel:
            reply = SamplerServiceStub(channel).ComputeLogprobs(request, metadata=peer_metadata(credential, "team"))
        reached = np.frombuffer(reply.logprobs.data, np.float32)[-len(COMPLETION) :]
        trained = logprobs(training)
        np.testing.assert_allclose(reached, trained, atol=1e-4)
        assert np.abs(trained - untrained).max() > 0.1
    with sampler_of(cluster), pytest.raises(errors.Unsupported, match="whole model"):
        whole = service.create_sampling_client(checkpoint.path)
        whole.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()
