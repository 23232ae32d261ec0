"""A sampler shows that it computes what its trainer computes; otherwise it is not ready and says why."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from support.models.tiny_models import make_tiny_llama, make_tiny_qwen3
from support.stacks.cluster import Cluster
from support.stacks.sampler_stack import PROMPT, Client, base_ref, sampling, until, version_ref
from support.stacks.weight_stack import BASE, CREDENTIAL, Trainer, make_version, serving
from transformers import AutoModelForCausalLM

import paceline
from paceline import codec, errors
from paceline.layout import Volume, new_run_id
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import peer_metadata
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import ModelRef
from paceline.types.v1 import full_pb2, model_pb2
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from sampler_service.agreement import compare
from sampler_service.engine.hf import engine as hf_engine

pytest_plugins = ["support.stacks.sampler_fixtures"]

TOKENS = np.random.default_rng(1).integers(260, size=64, dtype=np.int32)


def logprobs_of(model, tokens=TOKENS):
    """Return stock transformers' log-probabilities of all tokens but the first."""
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
    """Have the sampler score a probe; return its agreement."""
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
    """The bias is o_proj.bias of a Qwen3 with attention_bias, which vLLM leaves out. Tested in either dtype."""
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


async def test_a_sampler_with_a_shorter_context_scores_what_fits_in_it(model, tmp_path):
    trainer, expected = Trainer(None), logprobs_of(model)
    async with serving(trainer) as port, sampling(model, port, tmp_path, max_model_len=32) as client:
        agreement = await measured(trainer, probe(expected))
        assert (agreement.tokens, agreement.refusal) == (31, "")
        assert await client.is_ready()
        expected[30] += 100
        assert (await measured(trainer, probe(expected))).refusal


async def test_tokens_that_the_sampler_cannot_score_and_answers_that_are_no_numbers_are_a_refusal(
    model, trainer, client
):
    beyond = np.full(8, 10_000, np.int32)
    agreement = await measured(trainer, probe(np.zeros(7, np.float32), tokens=beyond))
    assert "cannot score" in agreement.refusal
    expected = logprobs_of(model)
    expected[3] = np.nan
    agreement = await measured(trainer, probe(expected))
    assert "1 of 63 log-probabilities are not finite" in agreement.refusal
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


@dataclass
class TwoTenants:
    """A run of Alice's and one of Bob's. Their versions with the same number have the same weights."""

    trainer: Trainer
    client: Client
    volume: Volume
    model: Path
    alices: str = field(default_factory=new_run_id)
    bobs: str = field(default_factory=new_run_id)

    @property
    def alice(self):
        return self.client.be("alice")

    @property
    def bob(self):
        return self.client.be("bob")

    async def publish(self, version):
        """Have the sampler load a version of each run; return its log-probabilities for the tokens of `compare`."""
        loaded = len(self.trainer.heard("acknowledgement"))
        for tenant, run_id in (("alice", self.alices), ("bob", self.bobs)):
            self.trainer.announce(make_version(self.volume, self.model, run_id, version, tenant=tenant))
        await until(lambda: len(self.trainer.heard("acknowledgement")) == loaded + 2)
        ours, _ = await self.bob.logprobs(version_ref(self.bobs, version))
        return np.frombuffer(ours, np.float32)[1:].copy()

    async def compare(self, version, theirs):
        """Have the sampler compare a version of Alice's run."""
        ref = ModelRef(run_id=self.alices, version=version)
        return await measured(self.trainer, probe(theirs, ref, tokens=np.array(PROMPT, np.int32)))

    async def delete_alices(self):
        gone = weights_pb.RunDeleted(run_id=self.alices)
        self.trainer.tell(weights_pb.WatchVersionsResponse(run_deleted=gone))
        await until(lambda: self.client.metric("runs_refused") == 0)

    async def others_are_served(self):
        """Check that Bob can use the base model and his own run, and Alice the base model."""
        for caller, ref in ((self.bob, base_ref()), (self.bob, version_ref(self.bobs)), (self.alice, base_ref())):
            assert len((await caller.sample(ref)).sequences) == 1
            await caller.logprobs(ref)
        assert await self.client.is_ready()


@pytest.fixture
def two_tenants(trainer, client, volume, model):
    return TwoTenants(trainer, client, volume, model)


async def test_a_version_that_does_not_agree_is_refused_and_nobody_elses(two_tenants):
    alice, run_id = two_tenants.alice, two_tenants.alices
    theirs = await two_tenants.publish(1)
    agreement = await two_tenants.compare(1, theirs - 1)
    assert agreement.mean_difference == pytest.approx(1)
    await two_tenants.others_are_served()
    for asked in (alice.sample(version_ref(run_id)), alice.logprobs(version_ref(run_id, 1))):
        with pytest.raises(errors.BaseMismatch, match=f"version 1 of {run_id} .* differ by 1 .* 0.00018") as failure:
            await asked
        told = {"run_id": run_id, "version": "1", "mean_difference": "1", "bound": "0.00018"}
        assert failure.value.metadata.items() >= told.items()
    assert two_tenants.client.metric("runs_refused") == 1


async def test_of_a_run_that_is_refused_its_tenant_alone_is_told(two_tenants):
    await two_tenants.compare(1, await two_tenants.publish(1) - 1)
    (shown,) = (await info_of(two_tenants.alice)).agreements
    assert (shown.model.run_id, shown.mean_difference) == (two_tenants.alices, pytest.approx(1))
    assert "differ by 1" in shown.refusal
    info = await info_of(two_tenants.bob)
    assert two_tenants.alices not in str(info)
    assert (info.refusal, list(info.agreements)) == ("", [])
    with pytest.raises(errors.RunNotFound, match="no such run: "):
        await two_tenants.bob.sample(version_ref(two_tenants.alices))


async def test_a_run_that_was_deleted_before_it_is_compared_is_no_warning(trainer, client):
    with capture_logs() as logged:
        trainer.tell(probe(np.zeros(63, np.float32), ModelRef(run_id=new_run_id(), version=1)))
        (line,) = await until(lambda: [line for line in logged if line["event"] == "not compared with the trainer"])
    assert (line["reason"], line["log_level"]) == ("RUN_NOT_FOUND", "info")


async def test_a_later_version_that_agrees_ends_a_runs_refusal_from_there_on(two_tenants):
    alice, run_id = two_tenants.alice, two_tenants.alices
    await two_tenants.compare(1, await two_tenants.publish(1) - 1)
    theirs = await two_tenants.publish(2)
    asks = {(ack.run_id, ack.version): ack.run_refused for ack in two_tenants.trainer.heard("acknowledgement")}
    assert [key for key, is_asked in asks.items() if is_asked] == [(run_id, 2)], "which is to be compared, too"
    with pytest.raises(errors.BaseMismatch, match="version 1 of"):
        await alice.sample(version_ref(run_id, 2))
    assert not (await two_tenants.compare(2, theirs)).refusal
    assert (await alice.sample(version_ref(run_id))).model.version == 2
    with pytest.raises(errors.BaseMismatch, match="version 1 of"):
        await alice.sample(version_ref(run_id, 1))
    assert two_tenants.client.metric("runs_refused") == 0


async def test_versions_that_were_not_compared_take_the_result_of_the_last_one_before_them(two_tenants):
    """Versions 5, 6, 3 and 2 are compared, in this order; versions 1 and 4 are not."""
    alice, run_id = two_tenants.alice, two_tenants.alices
    theirs = [await two_tenants.publish(version) for version in (1, 2, 3, 4, 5, 6)]
    for version, is_same in ((5, False), (6, True), (3, True), (2, False)):
        await two_tenants.compare(version, theirs[version - 1] - (0 if is_same else 1))
    for version, refused_as in enumerate((2, 2, None, None, 5, None), start=1):
        if refused_as is None:
            assert len((await alice.sample(version_ref(run_id, version))).sequences) == 1
        else:
            with pytest.raises(errors.BaseMismatch, match=f"version {refused_as} of"):
                await alice.sample(version_ref(run_id, version))


async def test_a_run_that_has_diverged_on_the_trainer_is_refused_as_its_own_fault(two_tenants):
    theirs = await two_tenants.publish(1)
    theirs[3:5] = np.nan, -np.inf
    agreement = await two_tenants.compare(1, theirs)
    assert f"2 of {len(theirs)} are NaN or infinite on the trainer" in agreement.refusal
    with pytest.raises(
        errors.NonFinite, match=r"the run has diverged: .* no finite log-probabilities .*; load an earl"
    ):
        await two_tenants.alice.sample(version_ref(two_tenants.alices))
    await two_tenants.others_are_served()
    labels = {"weights": "version", "statistic": "mean"}
    shown = two_tenants.client.metrics.get_sample_value("paceline_sampler_logprob_difference", labels)
    assert shown == np.inf, "which is no agreement"


async def test_a_run_that_was_deleted_is_forgotten(two_tenants):
    await two_tenants.compare(1, await two_tenants.publish(1) - 1)
    await two_tenants.delete_alices()
    assert not (await info_of(two_tenants.alice)).agreements


def test_numbers_that_are_not_finite_never_agree():
    for ours, theirs in ((np.nan, 0), (0, np.nan), (np.nan, np.nan), (-np.inf, -np.inf), (-np.inf, 0)):
        for run_id in ("", "run"):
            agreement = weights_pb.Agreement(model=model_pb2.ServedModel(run_id=run_id), bound=1e30)
            compare(agreement, np.full(2, ours, np.float32), np.array([theirs, 0], np.float32))
            assert "are not finite" in agreement.refusal
    agreement = weights_pb.Agreement(bound=1)
    compare(agreement, np.full(2, -3e38, np.float32), np.full(2, 3e38, np.float32))
    assert agreement.refusal
    assert agreement.max_difference == 1e30, "what the contract takes"


class Elsewhere(Trainer):
    """A trainer that rejects samplers until `same` says that they share its base weights."""

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
    """A trainer whose samplers the tests start."""
    state = tmp_path_factory.mktemp("trainer")
    (state / "credential").write_text(CREDENTIAL)
    cluster = Cluster.make(state, make_tiny_llama(state / BASE))
    with cluster.running(cluster.trainer):
        yield cluster


@asynccontextmanager
async def following(cluster, folder, **settings):
    """Run a sampler of the cluster's trainer; yield the sampler and a caller of the trainer."""
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
        """Return the agreements that the trainer has, or None while there are fewer than `count`."""
        answer = await self.stub.GetServerInfo(trainer_pb.GetServerInfoRequest(), metadata=self.metadata)
        return answer.agreements if len(answer.agreements) >= count else None

    async def call(self, method, request):
        return await getattr(self.stub, method)(request, metadata=self.metadata)

    async def compared(self, run_id, version):
        """Return the agreement of a version, or None before the version was compared."""
        known = {(one.model.run_id, one.model.version): one for one in await self.agreements()}
        return known.get((run_id, version))

    async def create_run(self, name, **parameters):
        request = trainer_pb.CreateRunRequest(request_id=name, **parameters)
        return (await self.stub.CreateRun(request, metadata=self.metadata)).run.run_id

    async def publish_trained(self, run_id, seq_id=1, **adam):
        """Train one step, publish, and return when all samplers have the version."""
        datum = codec.datum_to_proto(paceline.Datum.from_completion([1, 2, 3, 4], [5, 6, 7]))
        step = codec.optimizer_to_proto(paceline.AdamParams(**{"learning_rate": 0.01, **adam}))
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
    """Like an engine that leaves out a trained bias: its base model is right, and its versions are wrong."""
    load, wrong = hf_engine.load, {1}

    def load_wrongly(options):
        loaded = load(options)
        if options.model_path.name in map(str, wrong):
            loaded.model.model.layers[0].self_attn.o_proj.weight.data.mul_(0.5)
        return loaded

    monkeypatch.setattr(hf_engine, "load", load_wrongly)
    async with following(cluster, tmp_path, bridge="restart") as (client, caller):
        await until(lambda: caller.agreements(1))
        run_id = await caller.create_run(tmp_path.name, **WHOLE)
        await caller.publish_trained(run_id)
        _, version = await until(lambda: caller.agreements(2))
        assert version.mean_difference > version.bound
        assert "differ by" in version.refusal
        with pytest.raises(errors.BaseMismatch, match="differ by"):
            await client.be("team").sample(version_ref(run_id, 1))
        assert await client.is_ready()
        labels = {"weights": "version", "statistic": "mean"}
        shown = client.metrics.get_sample_value("paceline_sampler_logprob_difference", labels)
        assert shown == version.mean_difference

        await caller.publish_trained(run_id, seq_id=4)
        assert not (await until(lambda: caller.compared(run_id, 2))).refusal
        assert (await client.be("team").sample(version_ref(run_id, 2))).model.version == 2
        assert len((await client.be("stranger").sample(base_ref())).sequences) == 1


@pytest.mark.services
async def test_a_run_that_diverges_is_refused_until_it_publishes_weights_that_agree(cluster, tmp_path):
    """Its steps are within all bounds, and its weights are huge but finite."""
    async with following(cluster, tmp_path) as (client, alice):
        bob = Caller(alice.stub, peer_metadata(CREDENTIAL, "bob"))
        run_id = await alice.create_run("alice", **ADAPTER)
        other = await bob.create_run("bob", **ADAPTER)
        save = {"kind": trainer_pb.CHECKPOINT_KIND_STATE, "name": "before"}
        await alice.call("SaveCheckpoint", trainer_pb.SaveCheckpointRequest(run_id=run_id, seq_id=1, **save))
        await alice.publish_trained(run_id, 2, learning_rate=1e6, weight_decay=1e6)
        await alice.publish_trained(run_id, 5, learning_rate=1e6, weight_decay=1e6)
        agreement = await until(lambda: alice.compared(run_id, 2))
        with pytest.raises(errors.PacelineError, match="version 2 of") as refusal:
            await client.be("team").sample(version_ref(run_id))
        assert isinstance(refusal.value, errors.NonFinite | errors.BaseMismatch)
        assert agreement.refusal in refusal.value.message

        await bob.publish_trained(other)
        assert not (await until(lambda: bob.compared(other, 1))).refusal
        for ref in (base_ref(), version_ref(other)):
            assert len((await client.be("bob").sample(ref)).sequences) == 1
        assert await client.is_ready()
        for info in (await bob.agreements(), await info_of(client.be("bob"))):
            assert run_id not in str(info)

        load = trainer_pb.LoadCheckpointRequest(run_id=run_id, seq_id=8, path=f"paceline://{run_id}/state/before")
        await alice.call("LoadCheckpoint", load)
        await alice.publish_trained(run_id, 9)
        assert not (await until(lambda: alice.compared(run_id, 3))).refusal
        assert (await client.be("team").sample(version_ref(run_id))).model.version == 3
        for caller, its in ((alice, run_id), (bob, other)):
            await caller.call("DeleteRun", trainer_pb.DeleteRunRequest(run_id=its))
        assert [one.model.run_id for one in await alice.agreements()] == [""]
