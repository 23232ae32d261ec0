"""Runs, checkpoints, versions and samplers that meet a base model other than the one they were made on."""

from __future__ import annotations

import os

import grpc
import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster
from support.stacks.sampler_stack import until, version_ref
from support.stacks.weight_stack import BASE, make_version

from paceline import codec, errors
from paceline.base_model.base_weights import base_weights_sha256
from paceline.layout import new_run_id
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Datum
from paceline.types.v1 import lora_pb2
from paceline.weights import read_manifest, write_manifest
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceStub
from trainer_service.volume_files import read_run_file

pytest_plugins = ["support.stacks.sampler_fixtures"]
pytestmark = pytest.mark.services


class Caller:
    """A tenant's connection to the trainer, and one run of its own."""

    def __init__(self, channel, credential):
        self.stub, self.weights = TrainerServiceStub(channel), WeightServiceStub(channel)
        self.metadata = peer_metadata(credential, "team")
        self.run_id, self.seq_id = "", 0

    async def call(self, method, request):
        try:
            return await getattr(self.stub, method)(request, metadata=self.metadata, timeout=60)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    async def command(self, method, **fields):
        self.seq_id += 1
        message = getattr(pb, f"{method}Request")
        return await self.call(method, message(run_id=self.run_id, seq_id=self.seq_id, **fields))

    async def create_run(self):
        request = pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=lora_pb2.LoraConfig(rank=4))
        self.run_id, self.seq_id = (await self.call("CreateRun", request)).run.run_id, 0
        return self

    async def forward_backward(self):
        datum = codec.datum_to_proto(Datum.from_completion([1, 2, 3, 4], [5, 6, 7]))
        return await self.command("ForwardBackward", data=[datum], loss_fn="cross_entropy")


async def _watch(caller, credential, **hello):
    """Return the first message that the trainer sends to a sampler with this base."""
    watch = caller.weights.WatchVersions(metadata=peer_metadata(credential))
    message = weights_pb.Hello(sampler_id="sampler", **hello)
    await watch.write(weights_pb.WatchVersionsRequest(hello=message))
    try:
        return await watch.read()
    except grpc.aio.AioRpcError as failure:
        raise error_from_rpc(failure) from None
    finally:
        watch.cancel()


async def test_a_trainer_with_other_weights_under_the_same_name_refuses_what_was_made_before(tmp_path):
    models = [make_tiny_llama(tmp_path / name / "model", seed=seed) for seed, name in enumerate(("one", "other"))]
    ours, theirs = (base_weights_sha256(str(model)) for model in models)
    cluster = Cluster.make(tmp_path, models[0])
    credential = (tmp_path / "credential").read_text()
    address = cluster.trainer.plan.environment["PACELINE_TRAINER_LISTEN"]
    volume = tmp_path / "checkpoints" / "runs"
    with cluster.running(cluster.trainer):
        async with open_channel(address) as channel:
            caller = await Caller(channel, credential).create_run()
            info = await caller.call("GetServerInfo", pb.GetServerInfoRequest())
            assert info.models[0].weights_sha256 == ours
            checkpoint = (await caller.command("SaveCheckpoint", name="made", kind=pb.CHECKPOINT_KIND_STATE)).checkpoint
            await caller.command("PublishWeights", durable=True)
            assert (await _watch(caller, credential, base_model="model", base_sha256=ours)).HasField("welcome")
            with pytest.raises(errors.BaseMismatch, match=f"{theirs}.*{ours}"):
                await _watch(caller, credential, base_model="model", base_sha256=theirs)
            with pytest.raises(errors.BaseMismatch, match="another, but the trainer's model is model"):
                await _watch(caller, credential, base_model="another")
    run = volume / caller.run_id
    assert read_run_file(run)["base_sha256"] == ours
    for made in (run / "state" / "made", run / "versions" / "1"):
        assert read_manifest(made).base_sha256 == ours
    cluster.trainer.plan.environment["PACELINE_TRAINER_MODEL"] = str(models[1])
    with cluster.running(cluster.trainer):
        async with open_channel(address) as channel:
            caller = Caller(channel, credential)
            caller.run_id, caller.seq_id = run.name, 2
            with pytest.raises(errors.BaseMismatch, match=f"{ours}.*{theirs}") as failure:
                await caller.forward_backward()
            assert failure.value.metadata == {"theirs": ours, "ours": theirs}
            await caller.create_run()
            with pytest.raises(errors.BaseMismatch, match=f"{ours}.*{theirs}"):
                await caller.command("LoadCheckpoint", path=checkpoint.path)
            await caller.forward_backward()
    cluster.trainer.plan.environment["PACELINE_TRAINER_MODEL"] = str(models[0])
    cluster.trainer.plan.environment["PACELINE_TRAINER_MODEL_NAME"] = "renamed"
    with cluster.running(cluster.trainer):
        async with open_channel(address) as channel:
            caller = Caller(channel, credential)
            caller.run_id, caller.seq_id = run.name, 2
            await caller.forward_backward()
            assert (await caller.command("PublishWeights", durable=True)).model.base_model == "renamed"
    assert read_manifest(run / "versions" / "2").base_sha256 == ours


async def test_a_sampler_takes_no_version_that_was_made_on_other_weights(model, volume, trainer, client):
    run_id = new_run_id()
    manifest = make_version(volume, model, run_id, 1)
    ours = base_weights_sha256(str(model))
    manifest.base_sha256 = "0" * 64
    write_manifest(volume.version(run_id, 1), manifest)
    trainer.announce(manifest)
    (refusal,) = await until(lambda: trainer.heard("refusal"))
    assert (refusal.reason, refusal.message.count(ours)) == ("BASE_MISMATCH", 1)
    with pytest.raises(errors.BaseMismatch):
        await client.sample(version_ref(run_id, 1))
    manifest.base_sha256, manifest.model.base_model = ours, "the same weights by another name"
    write_manifest(volume.version(run_id, 1), manifest)
    assert (await client.sample(version_ref(run_id, 1))).model.version == 1
    (hello,) = trainer.heard("hello")
    assert (hello.base_model, hello.base_sha256) == (BASE, ours)
