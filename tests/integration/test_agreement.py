"""A sampler shows that it computes what its trainer computes, or is not ready and says why."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cluster import Cluster
from sampler_stack import PROMPT, base_ref, sampling, until, version_ref
from tiny_models import make_tiny_llama, make_tiny_qwen3
from transformers import AutoModelForCausalLM
from weight_stack import BASE, CREDENTIAL, Trainer, make_version, serving

import paceline
from paceline import codec, errors
from paceline.layout import new_run_id
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import peer_metadata
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import ModelRef
from paceline.types.v1 import full_pb2
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from sampler_service.engine import hf_engine

pytest_plugins = ["sampler_fixtures"]

TOKENS = np.random.default_rng(1).integers(260, size=64, dtype=np.int32)


def logprobs_of(model, tokens=TOKENS):
    """What stock transformers gives for all tokens but the first."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.inference_mode():
        rows = AutoModelForCausalLM.from_pretrained(model).eval()(ids[None]).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, ids[1:, None])[:, 0].numpy()


def probe(logprobs, ref=None, dtype="float32", tokens=TOKENS):
    message = weights_pb.Probe(
        model=codec.model_ref_to_proto(ref or ModelRef()),
        tokens=codec.tensor_to_proto(tokens),
        logprobs=codec.tensor_to_proto(logprobs),
        dtype=dtype,
    )
    return weights_pb.WatchVersionsResponse(probe=message)


async def measured(trainer, message):
    """Have the sampler score a probe; return what it says."""
    count = len(trainer.heard("agreement"))
    trainer.tell(message)
    return (await until(lambda: trainer.heard("agreement")[count:]))[0]


async def info_of(client):
    return await client.call("GetServerInfo", sampler_pb.GetServerInfoRequest())


async def test_a_sampler_that_computes_what_the_trainer_computes_says_how_closely(model, trainer, client):
    agreement = await measured(trainer, probe(logprobs_of(model)))
    assert agreement.mean_difference <= agreement.max_difference <= agreement.bound < 1e-3
    assert (agreement.tokens, agreement.refusal) == (63, "")
    assert (agreement.trainer_dtype, agreement.sampler_dtype) == ("float32", "float32")
    (shown,) = (await info_of(client)).agreements
    assert shown.mean_difference == agreement.mean_difference
    labels = {"weights": "base", "statistic": "mean"}
    assert client.metrics.get_sample_value("paceline_sampler_logprob_difference", labels) == shown.mean_difference


async def test_one_that_does_not_is_not_ready_and_answers_nothing_until_it_does(model, trainer, client, tmp_path):
    other = make_tiny_llama(tmp_path / "other", seed=7)
    agreement = await measured(trainer, probe(logprobs_of(other)))
    assert agreement.mean_difference > 1
    assert "give both the same model" in agreement.refusal
    assert not await client.is_ready()
    assert (await info_of(client)).refusal == agreement.refusal
    for asked in (client.sample(base_ref()), client.logprobs(base_ref())):
        with pytest.raises(errors.BaseMismatch, match="differ by"):
            await asked
    assert not (await measured(trainer, probe(logprobs_of(model)))).refusal
    assert await client.is_ready()
    assert len((await client.sample(base_ref())).sequences) == 1


async def test_a_bias_that_one_side_leaves_out_is_found(tmp_path):
    """What vLLM does with o_proj.bias of a Qwen3 with attention_bias, in either dtype."""
    whole = make_tiny_qwen3(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(whole, attention_bias=True)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    model.save_pretrained(whole)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.bias, std=2.0)
    model.save_pretrained(tmp_path / "biased")
    trainer = Trainer(None)
    async with serving(trainer) as port, sampling(whole, port, tmp_path):
        assert not (await measured(trainer, probe(logprobs_of(whole)))).refusal
        for dtype in ("float32", "bfloat16"):
            assert (await measured(trainer, probe(logprobs_of(tmp_path / "biased"), dtype=dtype))).refusal


async def test_tokens_that_the_sampler_cannot_score_and_answers_that_are_no_numbers_are_a_refusal(
    model, trainer, client
):
    beyond = np.full(8, 10_000, np.int32)
    agreement = await measured(trainer, probe(np.zeros(7, np.float32), tokens=beyond))
    assert "cannot score" in agreement.refusal
    expected = logprobs_of(model)
    expected[3] = np.nan
    agreement = await measured(trainer, probe(expected))
    assert "1 of 63 log-probabilities are no finite numbers" in agreement.refusal
    assert agreement.tokens == 62
    assert agreement.max_difference < agreement.bound


async def test_a_version_is_compared_too(model, volume, trainer, client):
    run_id = new_run_id()
    trainer.announce(make_version(volume, model, run_id, 1))
    await until(lambda: trainer.heard("acknowledgement"))
    ours, _ = await client.logprobs(version_ref(run_id, 1))
    tokens = np.array(PROMPT, np.int32)
    ref = ModelRef(run_id=run_id, version=1)
    agreement = await measured(trainer, probe(np.frombuffer(ours, np.float32)[1:].copy(), ref, tokens=tokens))
    assert (agreement.model.version, agreement.mean_difference, agreement.refusal) == (1, 0, "")
    agreement = await measured(trainer, probe(logprobs_of(model, tokens), ref, tokens=tokens))
    assert agreement.refusal
    assert not await client.is_ready()


class Elsewhere(Trainer):
    """Turns samplers away until its base is theirs."""

    same = False

    async def WatchVersions(self, request_iterator, context):  # noqa: N802
        if not self.same:
            raise errors.BaseMismatch("the trainer has other base weights")
        yield weights_pb.WatchVersionsResponse(welcome=weights_pb.Welcome(trainer_instance="one"))
        async for message in super().WatchVersions(request_iterator, context):
            yield message


async def test_a_sampler_with_other_base_weights_than_its_trainer_is_not_ready(model, volume, tmp_path):
    trainer = Elsewhere(volume)
    async with serving(trainer) as port, sampling(model, port, tmp_path) as client:
        await until(lambda: _refuses(client))
        assert not await client.is_ready()
        with pytest.raises(errors.BaseMismatch, match="other base weights"):
            await client.sample(base_ref())
        trainer.same = True
        await until(client.is_ready)
        assert len((await client.sample(base_ref())).sequences) == 1


async def _refuses(client):
    return (await info_of(client)).refusal == "the trainer has other base weights"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A trainer whose samplers are made by the tests."""
    state = tmp_path_factory.mktemp("trainer")
    (state / "credential").write_text(CREDENTIAL)
    cluster = Cluster.make(state, make_tiny_llama(state / BASE))
    with cluster.running(cluster.trainer):
        yield cluster


@asynccontextmanager
async def following(cluster, folder, **settings):
    """Run a sampler of the cluster's trainer; gives it, and what calls the trainer."""
    address = cluster.trainer.plan.environment["PACELINE_TRAINER_LISTEN"]
    volume, port = cluster.state / "checkpoints", int(address.rpartition(":")[2])
    async with (
        open_channel(address) as channel,
        sampling(cluster.state / BASE, port, folder, checkpoint_dir=volume, **settings) as client,
    ):
        yield client, Caller(TrainerServiceStub(channel), peer_metadata(CREDENTIAL, "team"))


@dataclass
class Caller:
    """A tenant of the trainer."""

    stub: TrainerServiceStub
    metadata: object

    async def agreements(self, count=0):
        """What the trainer knows of samplers, once that is so much."""
        answer = await self.stub.GetServerInfo(trainer_pb.GetServerInfoRequest(), metadata=self.metadata)
        return answer.agreements if len(answer.agreements) >= count else None

    async def create_run(self, name, **parameters):
        request = trainer_pb.CreateRunRequest(request_id=name, **parameters)
        return (await self.stub.CreateRun(request, metadata=self.metadata)).run.run_id

    async def publish_trained(self, run_id, seq_id=1):
        """Train a step, publish, and return when all samplers have the version."""
        datum = codec.datum_to_proto(paceline.Datum.from_completion([1, 2, 3, 4], [5, 6, 7]))
        step = codec.optimizer_to_proto(paceline.AdamParams(learning_rate=0.01))
        step.run_id, step.seq_id = run_id, seq_id + 1
        batch = {"seq_id": seq_id, "data": [datum], "loss_fn": "cross_entropy"}
        await self.stub.ForwardBackward(
            trainer_pb.ForwardBackwardRequest(run_id=run_id, **batch), metadata=self.metadata
        )
        await self.stub.OptimStep(step, metadata=self.metadata)
        publish = {"seq_id": seq_id + 2, "wait_for": trainer_pb.ACK_POLICY_ALL}
        await self.stub.PublishWeights(
            trainer_pb.PublishWeightsRequest(run_id=run_id, **publish), metadata=self.metadata
        )


ADAPTER = {"lora": codec.lora_config_to_proto(paceline.LoraConfig(rank=4))}
WHOLE = {"full": full_pb2.FullParameters()}
IN_HALF = {"full": full_pb2.FullParameters(storage=full_pb2.WEIGHT_STORAGE_BFLOAT16)}


@pytest.mark.services
@pytest.mark.parametrize(
    ("bridge", "parameters"),
    [
        ("stream", ADAPTER),
        ("volume", ADAPTER),
        ("collective", ADAPTER),
        ("restart", WHOLE),
        ("restart", IN_HALF),
    ],
    ids=["stream", "volume", "collective", "restart", "restart-bfloat16"],
)
async def test_the_trainer_has_each_sampler_measured_with_the_base_and_with_the_first_version(
    cluster, tmp_path, bridge, parameters
):
    async with following(cluster, tmp_path, bridge=bridge) as (client, caller):
        (base,) = await until(lambda: caller.agreements(1))
        assert (base.sampler_id, base.model.run_id, base.tokens) == ("domestique", "", 255)
        assert 0 < base.mean_difference < base.bound
        run_id = await caller.create_run(tmp_path.name, **parameters)
        try:
            await caller.publish_trained(run_id)
            both = await until(lambda: caller.agreements(2))
            assert [(one.model.run_id, one.model.version) for one in both] == [("", 0), (run_id, 1)]
            assert both[1].trainer_dtype == ("bfloat16" if parameters is IN_HALF else "float32")
            assert 0 < both[1].mean_difference < both[1].bound
            shown = [one.mean_difference for one in (await info_of(client.be("team"))).agreements]
            assert shown == [one.mean_difference for one in both]
            assert [one.model.run_id for one in (await info_of(client.be("stranger"))).agreements] == [""]
            runs = (await caller.stub.ListRuns(trainer_pb.ListRunsRequest(), metadata=caller.metadata)).runs
            assert [run.run_id for run in runs] == [run_id], "what scores is no run of anybody's"
        finally:
            await caller.stub.DeleteRun(trainer_pb.DeleteRunRequest(run_id=run_id), metadata=caller.metadata)


@pytest.mark.services
async def test_an_engine_that_computes_a_whole_model_otherwise_is_refused_until_a_version_agrees(
    cluster, tmp_path, monkeypatch
):
    """As one that leaves a trained bias out: its base model is right, and its versions are not."""
    load, wrong = hf_engine._load, {1}

    def load_wrongly(options):
        loaded = load(options)
        if options.model_path.name in map(str, wrong):
            loaded.model.model.layers[0].self_attn.o_proj.weight.data.mul_(0.5)
        return loaded

    monkeypatch.setattr(hf_engine, "_load", load_wrongly)
    async with following(cluster, tmp_path, bridge="restart") as (client, caller):
        await until(lambda: caller.agreements(1))
        run_id = await caller.create_run(tmp_path.name, **WHOLE)
        await caller.publish_trained(run_id)
        _, version = await until(lambda: caller.agreements(2))
        assert version.mean_difference > version.bound
        assert "differ by" in version.refusal
        await until(lambda: _is_unready(client))
        with pytest.raises(errors.BaseMismatch, match="differ by"):
            await client.be("team").sample(version_ref(run_id, 1))
        labels = {"weights": "version", "statistic": "mean"}
        shown = client.metrics.get_sample_value("paceline_sampler_logprob_difference", labels)
        assert shown == version.mean_difference

        await caller.publish_trained(run_id, seq_id=4)
        await until(client.is_ready)
        assert [(one.model.version, one.refusal) for one in await caller.agreements(2)] == [(0, ""), (2, "")]
        assert (await client.be("team").sample(version_ref(run_id, 2))).model.version == 2


async def _is_unready(client):
    return not await client.is_ready()
