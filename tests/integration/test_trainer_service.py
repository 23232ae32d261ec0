"""The trainer service as a process, called with the generated stubs."""

import asyncio
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import torch
from blake3 import blake3
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from prometheus_client.parser import text_string_to_metric_families
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama
from support.patience import PATIENCE
from support.ports import free_port
from support.stacks.cluster import Cluster
from transformers import AutoModelForCausalLM

from paceline import codec, errors
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import AdamParams, ApolloParams, Datum, PackingMode
from paceline.types.optimizers import OPTIMIZERS
from paceline.types.v1 import lora_pb2, model_pb2
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceStub
from trainer_service.publish.volume_copies import ANSWER_SECONDS

pytestmark = pytest.mark.services

DATUM = Datum.from_completion([1, 2, 3, 4], [5, 6, 7], logprobs=-1.0, advantages=1.0)
SFT_DATUM = Datum.from_completion([1, 2, 3, 4], [5, 6, 7])
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    state = tmp_path_factory.mktemp("trainer")
    model = make_tiny_llama(state / "model")
    cluster = Cluster.make(
        state,
        model,
        PACELINE_TRAINER_KEEP_VERSIONS="2",
        PACELINE_TRAINER_MAX_RUNS_PER_TENANT="1000",
        PACELINE_TRAINER_GAP_WAIT_SECONDS="5",
        PACELINE_TRAINER_EXPIRY_CHECK_SECONDS="0.2",
        PACELINE_TRAINER_STAGING_DIR=str(state / "shm"),
        PACELINE_TRAINER_METRICS_LISTEN=f"127.0.0.1:{free_port()}",
        PACELINE_TRAINER_LOG_FORMAT="json",
    )
    cluster.trainer.start()
    yield cluster
    cluster.trainer.stop()


class Caller:
    """A tenant's connection to the trainer, and one run of its own."""

    def __init__(self, channel, credential, tenant):
        self.stub = TrainerServiceStub(channel)
        self.weights = WeightServiceStub(channel)
        self.metadata = peer_metadata(credential, tenant)
        self.seq_id = 0
        self.run_id = ""

    async def call(self, method, request):
        try:
            return await getattr(self.stub, method)(request, metadata=self.metadata, timeout=PATIENCE)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    async def command(self, method, message, **fields):
        self.seq_id += 1
        return await self.call(method, message(run_id=self.run_id, seq_id=self.seq_id, **fields))

    async def create_run(self, **lora):
        request = pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=lora_pb2.LoraConfig(**{"rank": 4, **lora}))
        self.run_id = (await self.call("CreateRun", request)).run.run_id
        self.seq_id = 0
        return self

    async def forward_backward(self, data=(SFT_DATUM,), loss_fn="cross_entropy", **fields):
        encoded = [codec.datum_to_proto(datum) for datum in data]
        return await self.command("ForwardBackward", pb.ForwardBackwardRequest, data=encoded, loss_fn=loss_fn, **fields)

    async def optim_step(self, **params):
        return await self.optimize(AdamParams(**{"learning_rate": 1e-2, **params}))

    async def optimize(self, params):
        self.seq_id += 1
        request = codec.optimizer_to_proto(params)
        request.run_id, request.seq_id = self.run_id, self.seq_id
        return await self.call("OptimStep", request)

    async def discard_gradient(self):
        return await self.command("OptimStep", pb.OptimStepRequest, discard_gradient=pb.DiscardGradient())

    async def train(self, steps=1):
        for _ in range(steps):
            await self.forward_backward()
            step = await self.optim_step()
        return step

    async def save(self, name, kind=pb.CHECKPOINT_KIND_STATE, **fields):
        reply = await self.command("SaveCheckpoint", pb.SaveCheckpointRequest, name=name, kind=kind, **fields)
        return reply.checkpoint

    async def load(self, path, **fields):
        return await self.command("LoadCheckpoint", pb.LoadCheckpointRequest, path=path, **fields)

    async def publish(self, **fields):
        return await self.command("PublishWeights", pb.PublishWeightsRequest, **fields)

    async def list_checkpoints(self):
        return (await self.call("ListCheckpoints", pb.ListCheckpointsRequest(run_id=self.run_id))).checkpoints

    async def get_run(self):
        return (await self.call("GetRun", pb.GetRunRequest(run_id=self.run_id))).run

    async def logprobs(self):
        reply = await self.forward_backward(forward_only=True)
        return codec.output_from_proto(reply.outputs[0], "")["logprobs"]


@pytest.fixture
async def channel(cluster):
    async with open_channel(cluster.trainer.plan.environment["PACELINE_TRAINER_LISTEN"]) as channel:
        yield channel


@pytest.fixture
def credential(cluster):
    return (cluster.state / "credential").read_text()


@pytest.fixture
async def caller(channel, credential):
    """A tenant with a run. Its runs are deleted after the test, because a restarted trainer restores all runs."""
    caller = await Caller(channel, credential, "team").create_run()
    yield caller
    while runs := (await caller.call("ListRuns", pb.ListRunsRequest())).runs:
        for run in runs:
            await caller.call("DeleteRun", pb.DeleteRunRequest(run_id=run.run_id, delete_checkpoints=True))


def with_input(name, values, datum=DATUM):
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, name: np.asarray(values)})


def without_input(name):
    return replace(DATUM, loss_fn_inputs={key: value for key, value in DATUM.loss_fn_inputs.items() if key != name})


ONES = np.ones(6, np.float32)
BAD_BATCHES = {
    "empty batch": ([], "ppo", {}, errors.EmptyBatch, "data"),
    "unknown loss": ([DATUM], "reinforce", {}, errors.UnknownLoss, "loss_fn"),
    "unknown setting": ([DATUM], "ppo", {"epsilon": 0.2}, errors.UnknownField, "loss_fn_config[epsilon]"),
    "missing input": ([without_input("advantages")], "ppo", {}, errors.MissingField, "data[0].loss_inputs[advantages]"),
    "unknown input": ([with_input("rewards", ONES)], "ppo", {}, errors.UnknownField, "data[0].loss_inputs[rewards]"),
    "wrong dtype": (
        [with_input("advantages", np.ones(6, np.int32))],
        "ppo",
        {},
        errors.InvalidDtype,
        "data[0].loss_inputs[advantages].dtype",
    ),
    "wrong length": (
        [with_input("advantages", ONES[:5])],
        "ppo",
        {},
        errors.InvalidShape,
        "data[0].loss_inputs[advantages].shape",
    ),
    "wrong shape": (
        [with_input("advantages", np.ones((6, 1), np.float32))],
        "ppo",
        {},
        errors.InvalidShape,
        "data[0].loss_inputs[advantages].shape",
    ),
    "input token": (
        [replace(DATUM, model_input=np.array([0, 1, 2, 3, 4, VOCAB_SIZE], np.int32))],
        "ppo",
        {},
        errors.TokenOutOfRange,
        "data[0].model_input",
    ),
    "target token": (
        [with_input("target_tokens", np.array([0, 1, 2, 3, 4, -1]))],
        "ppo",
        {},
        errors.TokenOutOfRange,
        "data[0].loss_inputs[target_tokens]",
    ),
    "nan advantage": (
        [DATUM, with_input("advantages", ONES * np.float32("nan"))],
        "ppo",
        {},
        errors.NonFinite,
        "data[1].loss_inputs[advantages]",
    ),
    "infinite advantage": (
        [with_input("advantages", ONES * np.float32("inf"))],
        "ppo",
        {},
        errors.NonFinite,
        "data[0].loss_inputs[advantages]",
    ),
    "positive logprob": (
        [with_input("logprobs", ONES)],
        "ppo",
        {},
        errors.PositiveLogprob,
        "data[0].loss_inputs[logprobs]",
    ),
    "mask of twos": (
        [with_input("mask", np.full(6, 2, np.uint8))],
        "ppo",
        {},
        errors.OutOfRange,
        "data[0].loss_inputs[mask]",
    ),
    "several targets of a loss that takes one": (
        [with_input("target_tokens", np.ones((6, 2), np.int64))],
        "ppo",
        {},
        errors.InvalidShape,
        "data[0].loss_inputs[target_tokens].shape",
    ),
    "weights of another shape than the targets": (
        [with_input("target_tokens", np.ones((6, 2), np.int64), SFT_DATUM)],
        "cross_entropy",
        {},
        errors.InvalidShape,
        "data[0].loss_inputs[weights].shape",
    ),
    "no target": (
        [with_input("target_tokens", np.ones((6, 0), np.int64), SFT_DATUM)],
        "cross_entropy",
        {},
        errors.InvalidShape,
        "data[0].loss_inputs[target_tokens].shape",
    ),
    "threshold of a loss without": (
        [with_input("clip_low_threshold", ONES)],
        "dro",
        {},
        errors.UnknownField,
        "data[0].loss_inputs[clip_low_threshold]",
    ),
    "negative threshold": (
        [with_input("clip_low_threshold", -ONES)],
        "ppo",
        {},
        errors.OutOfRange,
        "data[0].loss_inputs[clip_low_threshold]",
    ),
    "nan threshold": (
        [with_input("clip_high_threshold", ONES * np.float32("nan"))],
        "gspo",
        {},
        errors.NonFinite,
        "data[0].loss_inputs[clip_high_threshold]",
    ),
    "upper threshold below the lower setting": (
        [with_input("clip_high_threshold", ONES * np.float32(0.5))],
        "ppo",
        {},
        errors.OutOfRange,
        "data[0].loss_inputs[clip_high_threshold]",
    ),
    "sequence mask of another loss": (
        [with_input("sequence_ratio_mask", np.ones(6, np.uint8))],
        "ppo",
        {},
        errors.UnknownField,
        "data[0].loss_inputs[sequence_ratio_mask]",
    ),
    "empty sequence mask": (
        [with_input("sequence_ratio_mask", np.array([1, 1, 1, 0, 0, 0], np.uint8))],
        "gspo",
        {},
        errors.InvalidArgument,
        "data[0].loss_inputs[sequence_ratio_mask]",
    ),
    "all masked": ([with_input("mask", np.zeros(6, np.uint8))], "ppo", {}, errors.EmptyBatch, "data"),
    "too long": (
        [Datum.from_completion([1] * 600, [2])],
        "cross_entropy",
        {},
        errors.SequenceTooLong,
        "data[0].model_input",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
async def test_a_bad_batch_is_refused_by_name_and_the_run_goes_on_unharmed(caller, case):
    data, loss_fn, config, error, field = BAD_BATCHES[case]
    await caller.forward_backward()
    with pytest.raises(error) as caught:
        await caller.forward_backward(data, loss_fn, loss_fn_config=config)
    assert (type(caught.value), caught.value.field) == (error, field)
    unharmed = await caller.optim_step()
    reference = await caller.create_run()
    assert unharmed.grad_norm == (await reference.train()).grad_norm


BAD_REDUCTIONS = {
    "unknown": ({"reduction": 9}, errors.InvalidArgument, "reduction"),
    "count of a sum": ({"reduction_count": 3}, errors.InvalidArgument, "reduction_count"),
    "too few positions": (
        {"reduction": pb.REDUCTION_TOKEN_MEAN, "reduction_count": 2},
        errors.OutOfRange,
        "reduction_count",
    ),
    "no datum": ({"reduction": pb.REDUCTION_SEQUENCE_MEAN, "reduction_count": 0}, errors.OutOfRange, "reduction_count"),
}


@pytest.mark.parametrize("case", BAD_REDUCTIONS)
async def test_a_bad_reduction_is_refused_by_name(caller, case):
    fields, error, field = BAD_REDUCTIONS[case]
    with pytest.raises(error) as caught:
        await caller.forward_backward(**fields)
    assert (type(caught.value), caught.value.field) == (error, field)


async def test_means_are_over_the_request_or_over_the_batch_that_it_is_a_part_of(caller):
    total = (await caller.forward_backward()).metrics["loss:sum"]
    for fields, divisor in [
        ({"reduction": pb.REDUCTION_TOKEN_MEAN}, 3),
        ({"reduction": pb.REDUCTION_TOKEN_MEAN, "reduction_count": 12}, 12),
        ({"reduction": pb.REDUCTION_SEQUENCE_MEAN}, 3),
        ({"reduction": pb.REDUCTION_SEQUENCE_MEAN, "reduction_count": 2}, 6),
    ]:
        reduced = (await caller.forward_backward(**fields)).metrics["loss:sum"]
        assert reduced == pytest.approx(total / divisor, rel=1e-6)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": float("nan")}, "beta2"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm"),
    ],
)
async def test_a_bad_optimizer_setting_is_refused_by_name_and_the_gradient_stays(caller, params, field):
    await caller.forward_backward()
    with pytest.raises((errors.OutOfRange, errors.NonFinite)) as caught:
        await caller.optim_step(**params)
    assert isinstance(caught.value, errors.NonFinite) != all(map(math.isfinite, params.values()))
    assert caught.value.field == f"adamw.{field}"
    assert (await caller.optim_step()).step == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_every_optimizer_trains_over_rpc_and_resumes_exactly(channel, credential, name):
    caller = await Caller(channel, credential, "optimizers").create_run()
    params = OPTIMIZERS[name](learning_rate=1e-2)
    await caller.forward_backward()
    assert (await caller.optimize(params)).step == 1
    path = (await caller.save(f"after-{name.replace('_', '-')}")).path
    await caller.forward_backward()
    expected = (await caller.optimize(params)).grad_norm, await caller.logprobs()
    await caller.load(path, with_optimizer=True)
    await caller.forward_backward()
    assert (await caller.optimize(params)).grad_norm == expected[0]
    np.testing.assert_array_equal(await caller.logprobs(), expected[1])


async def test_a_change_of_optimizer_is_refused_by_name_and_the_gradient_stays(channel, credential):
    caller = await Caller(channel, credential, "optimizers").create_run()
    await caller.forward_backward()
    await caller.optimize(ApolloParams())
    await caller.forward_backward()
    with pytest.raises(errors.OptimizerChanged) as caught:
        await caller.optimize(AdamParams())
    assert (caught.value.field, caught.value.metadata["optimizer"]) == ("adamw", "apollo")
    with pytest.raises(errors.OutOfRange) as caught:
        await caller.optimize(ApolloParams(rank=0))
    assert caught.value.field == "apollo.rank"
    assert (await caller.optimize(ApolloParams(learning_rate=0.5))).step == 2


async def test_the_server_lists_its_optimizers(channel, credential):
    caller = Caller(channel, credential, "optimizers")
    info = await caller.call("GetServerInfo", pb.GetServerInfoRequest())
    assert list(info.optimizers) == list(OPTIMIZERS)


async def test_the_server_shows_the_base_models_certificate(channel, credential):
    caller = Caller(channel, credential, "certificate")
    (info,) = (await caller.call("GetServerInfo", pb.GetServerInfoRequest())).models
    certificate = codec.model_info_from_proto(info).certificate
    assert (certificate.packing, certificate.attention, certificate.reason) == (
        PackingMode.PACKED,
        "paceline_packed",
        "",
    )
    assert 0 < certificate.logprob_difference <= certificate.logprob_bound < 1e-3
    assert 0 < certificate.gradient_difference <= certificate.gradient_bound < 1e-3
    assert [group.name for group in certificate.groups] == ["train_attn", "train_mlp", "train_unembed"]


def read_page(url):
    with urlopen(url, timeout=PATIENCE) as page:
        return page.read().decode()


async def test_metrics_and_the_log_say_what_the_certificate_says(cluster, channel, credential):
    caller = Caller(channel, credential, "certificate")
    (info,) = (await caller.call("GetServerInfo", pb.GetServerInfoRequest())).models
    certificate = codec.model_info_from_proto(info).certificate
    address = cluster.trainer.plan.environment["PACELINE_TRAINER_METRICS_LISTEN"]
    page = await asyncio.to_thread(read_page, f"http://{address}/metrics")
    prefix = "paceline_trainer_certificate_"
    shown = {
        (sample.name.removeprefix(prefix), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }
    assert shown == {
        ("difference", "logprobs"): certificate.logprob_difference,
        ("difference", "gradients"): certificate.gradient_difference,
        ("bound", "logprobs"): certificate.logprob_bound,
        ("bound", "gradients"): certificate.gradient_bound,
        ("seconds",): certificate.seconds,
        ("packs", "paceline_packed"): 1.0,
    }
    lines = [json.loads(line) for line in cluster.trainer.log.read_text().splitlines() if '"engine ready"' in line]
    logged = {name: lines[-1][name] for name in ("packing", "attention", "logprob_difference", "check_seconds")}
    assert logged == {
        "packing": certificate.packing.name,
        "attention": certificate.attention,
        "logprob_difference": certificate.logprob_difference,
        "check_seconds": certificate.seconds,
    }


async def test_a_step_without_a_gradient_is_refused(caller):
    with pytest.raises(errors.NoGradient):
        await caller.optim_step()


@pytest.mark.parametrize(
    ("lora", "error", "field"),
    [
        ({"rank": 17}, errors.RankTooLarge, "lora.rank"),
        ({"rank": 0}, errors.OutOfRange, "lora.rank"),
        ({"alpha": -1.0}, errors.OutOfRange, "lora.alpha"),
        ({"dropout": 1.0}, errors.OutOfRange, "lora.dropout"),
        ({"layers": [0, 2]}, errors.OutOfRange, "lora.layers[1]"),
        ({"train_attn": False, "train_mlp": False}, errors.InvalidArgument, "lora"),
        ({"target_modules": ["q_proj", "qkv"]}, errors.InvalidArgument, "lora.target_modules[1]"),
        ({"target_modules": ["q_proj"], "train_unembed": True}, errors.InvalidArgument, "lora.train_unembed"),
        ({"target_modules": ["q_proj", ""]}, errors.OutOfRange, "lora.target_modules[1]"),
        ({"target_modules": ["q_proj"] * 513}, errors.OutOfRange, "lora.target_modules"),
    ],
)
async def test_a_bad_adapter_is_refused_by_name(caller, lora, error, field):
    with pytest.raises(error) as caught:
        await caller.create_run(**lora)
    assert caught.value.field == field


async def test_the_answer_lists_the_modules_adapted(caller):
    lora = lora_pb2.LoraConfig(rank=4, train_mlp=False, layers=[1])
    made = await caller.call("CreateRun", pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=lora))
    assert list(made.run.adapted_modules) == [f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"]
    known = await caller.call("GetRun", pb.GetRunRequest(run_id=made.run.run_id))
    assert codec.run_from_proto(known.run).adapted_modules == tuple(made.run.adapted_modules)


async def test_an_unknown_base_model_is_refused(caller):
    request = pb.CreateRunRequest(request_id="x", base_model="other", lora=lora_pb2.LoraConfig(rank=4))
    with pytest.raises(errors.ModelNotFound):
        await caller.call("CreateRun", request)


async def test_a_message_that_is_too_large_is_a_typed_error(caller):
    with pytest.raises(errors.MessageTooLarge):
        await caller.call("CreateRun", pb.CreateRunRequest(user_metadata={"a": "x" * (33 << 20)}))


async def test_creating_a_run_twice_with_one_request_id_makes_one_run(caller):
    request = pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=lora_pb2.LoraConfig(rank=4))
    first, second = await asyncio.gather(caller.call("CreateRun", request), caller.call("CreateRun", request))
    assert first.run.run_id == second.run.run_id
    request.lora.rank = 8
    with pytest.raises(errors.RequestIdReused):
        await caller.call("CreateRun", request)
    request.request_id = ""
    with pytest.raises(errors.MissingField, match="generate one per run"):
        await caller.call("CreateRun", request)


async def test_the_client_that_attached_last_trains_the_run(caller):
    async def attach(request_id):
        return await caller.call("AttachRun", pb.AttachRunRequest(run_id=caller.run_id, request_id=request_id))

    first, second = await attach("first"), await attach("second")
    assert (first.attachment, second.attachment) == (1, 2)
    assert await attach("second") == second
    with pytest.raises(errors.MissingField, match="generate one per client that attaches"):
        await attach("")
    with pytest.raises(errors.ClientSuperseded):
        await attach("first")  # a late repeat does not supersede the second
    await caller.command(
        "ForwardBackward", pb.ForwardBackwardRequest, data=[codec.datum_to_proto(DATUM)], loss_fn="ppo"
    )
    step = pb.OptimStepRequest(run_id=caller.run_id, seq_id=caller.seq_id + 1, attachment=1)
    step.adamw.learning_rate = 1e-3
    with pytest.raises(errors.ClientSuperseded):
        await caller.call("OptimStep", step)
    step.attachment = 2
    assert (await caller.call("OptimStep", step)).step == 1


async def test_another_tenants_objects_look_absent(caller, channel, credential):
    checkpoint = await caller.save("mine")
    stranger = await Caller(channel, credential, "stranger").create_run()
    with pytest.raises(errors.RunNotFound):
        await stranger.call("GetRun", pb.GetRunRequest(run_id=caller.run_id))
    with pytest.raises(errors.CheckpointNotFound):
        await stranger.load(checkpoint.path)
    with pytest.raises(errors.CheckpointNotFound):
        await stranger.call("DeleteCheckpoint", pb.DeleteCheckpointRequest(path=checkpoint.path))
    listed = await stranger.call("ListRuns", pb.ListRunsRequest())
    assert caller.run_id not in {run.run_id for run in listed.runs}
    assert not (await stranger.call("ListCheckpoints", pb.ListCheckpointsRequest())).checkpoints


async def test_without_the_credential_nobody_is_let_in(channel):
    with pytest.raises(errors.MissingCredential):
        await Caller(channel, "wrong", "team").create_run()


async def test_a_state_checkpoint_resumes_with_the_same_steps(caller):
    await caller.train(2)
    checkpoint = await caller.save("two")
    straight = await caller.train(2)
    await caller.load(checkpoint.path, with_optimizer=True)
    assert (await caller.get_run()).step == 2
    resumed = await caller.train(2)
    assert (resumed.step, resumed.grad_norm) == (straight.step, straight.grad_norm)


async def test_a_run_shows_the_gradient_that_waits_also_after_loads_and_the_death_of_each_process(caller, cluster):
    reply = await caller.forward_backward()
    await caller.forward_backward(forward_only=True)
    tokens = int(reply.metrics["tokens:sum"])
    assert _place(await caller.get_run()) == (2, 0, tokens)
    half = await caller.save("half")
    await caller.forward_backward()
    assert _place(await caller.get_run()) == (4, 0, 2 * tokens)
    cluster.trainer.kill_engine()
    await _when_available(caller.logprobs)
    assert _place(await caller.get_run()) == (caller.seq_id, 0, 2 * tokens)
    assert (await caller.optim_step()).tokens == 2 * tokens
    assert _place(await caller.get_run()) == (caller.seq_id, 1, 0)
    loaded = await caller.load(half.path, with_optimizer=True)
    assert _place(loaded.run) == _place(await caller.get_run()) == (caller.seq_id, 0, tokens)
    cluster.trainer.kill()
    cluster.trainer.start()
    assert _place(await caller.get_run()) == (caller.seq_id, 0, tokens)
    await caller.load(half.path)
    assert _place(await caller.get_run()) == (caller.seq_id, 0, 0)
    await caller.forward_backward([with_input("weights", np.full(6, 3e38, np.float32), SFT_DATUM)])
    with pytest.raises(errors.NonFiniteGradient):
        await caller.optim_step()
    assert _place(await caller.get_run()) == (caller.seq_id, 0, 0), "a gradient that is not finite is dropped"


async def test_a_discarded_gradient_leaves_no_trace_also_after_the_death_of_each_process(caller, cluster):
    straight = await caller.train(2)
    await caller.create_run()
    assert (await caller.discard_gradient()) == pb.OptimStepResponse(), "nothing waits, and no optimizer is chosen"
    await caller.train()
    tokens = int((await caller.forward_backward([DATUM], "importance_sampling")).metrics["tokens:sum"])
    await caller.forward_backward([with_input("weights", np.full(6, 3e38, np.float32), SFT_DATUM)])
    with pytest.raises(errors.OptimizerChanged):
        await caller.optimize(ApolloParams())
    first = await caller.discard_gradient()
    assert first == pb.OptimStepResponse(step=1, tokens=2 * tokens)
    assert _place(await caller.get_run()) == (caller.seq_id, 1, 0)
    cluster.trainer.kill_engine()
    await _when_available(caller.logprobs)
    assert _place(await caller.get_run()) == (caller.seq_id, 1, 0)
    cluster.trainer.kill()
    cluster.trainer.start()
    assert _place(await caller.get_run()) == (caller.seq_id, 1, 0)
    again, caller.seq_id = caller.seq_id, 6
    assert await caller.discard_gradient() == first
    caller.seq_id = again
    resumed = await caller.train()
    assert (resumed.step, resumed.grad_norm) == (straight.step, straight.grad_norm)


async def test_what_a_run_shows_is_of_one_moment(caller):
    tokens = int((await caller.forward_backward()).metrics["tokens:sum"])
    await caller.optim_step()
    training = asyncio.ensure_future(caller.train(20))
    seen = set()
    while not training.done():
        seen.add(_place(await caller.get_run()))
    assert len(seen) > 10
    assert seen <= {(executed, executed // 2, tokens * (executed % 2)) for executed in range(2, 43)}


async def test_checkpoints_are_listed_in_pages_and_expire_and_are_not_overwritten_unasked(caller):
    for name in ("a", "b", "c"):
        await caller.save(name)
    with pytest.raises(errors.CheckpointExists):
        await caller.save("a")
    await caller.save("a", overwrite=True)
    names, token = [], ""
    while True:
        request = pb.ListCheckpointsRequest(run_id=caller.run_id, page_size=2, page_token=token)
        page = await caller.call("ListCheckpoints", request)
        names += [checkpoint.name for checkpoint in page.checkpoints]
        token = page.next_page_token
        if not token:
            break
    assert names == ["a", "c", "b"]
    path = f"paceline://{caller.run_id}/state/b"
    await caller.call("SetCheckpointTtl", pb.SetCheckpointTtlRequest(path=path, ttl_seconds=1))
    async with asyncio.timeout(PATIENCE):
        remaining = 3
        while remaining == 3:
            remaining = len(await caller.list_checkpoints())
    with pytest.raises(errors.CheckpointNotFound):
        await caller.load(path)


async def test_other_calls_are_answered_while_many_checkpoints_are_listed(caller, cluster):
    await caller.save("first")
    folder = cluster.state / "checkpoints" / "runs" / caller.run_id / "state"
    copies = [folder / f"copy-{number}" for number in range(1000)]
    try:
        for copy in copies:
            shutil.copytree(folder / "first", copy, copy_function=os.link)
        listing = asyncio.create_task(caller.list_checkpoints())
        await asyncio.sleep(0)  # so that the list is asked for first
        assert (await caller.get_run()).run_id == caller.run_id
        assert not listing.done()
        assert len(await listing) > 0
    finally:
        for copy in copies:
            shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["../../evil", "", ".hidden", "a/b", "/etc/passwd"])
async def test_path_tricks_in_names_are_refused(caller, name):
    with pytest.raises(errors.InvalidName) as caught:
        await caller.save(name)
    assert caught.value.field == "name"
    with pytest.raises(errors.InvalidPath):
        await caller.load(f"paceline://{caller.run_id}/state/{name}")


async def test_a_damaged_checkpoint_is_refused_and_the_run_goes_on(caller, cluster):
    await caller.train()
    checkpoint = await caller.save("damaged")
    before = await caller.logprobs()
    file = cluster.state / "checkpoints" / "runs" / caller.run_id / "state" / "damaged" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(errors.ChecksumMismatch):
        await caller.load(checkpoint.path, with_optimizer=True)
    np.testing.assert_array_equal(await caller.logprobs(), before)


async def test_a_checkpoint_of_another_rank_is_refused_by_name_with_the_remedy_and_the_run_goes_on(caller):
    await caller.create_run(rank=3)
    checkpoint = await caller.save("narrow")
    await caller.create_run(rank=4)
    for with_optimizer in (False, True):
        with pytest.raises(errors.CheckpointMismatch, match=r"rank is 3 .* 4 in the run; .*_from_state") as caught:
            await caller.load(checkpoint.path, with_optimizer=with_optimizer)
        assert caught.value.field == "path"
    assert (await caller.train()).step == 1


async def test_an_adapter_made_by_peft_is_imported_and_trained_further(caller, cluster, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(cluster.state / "model", dtype=torch.float32)
    made = get_peft_model(base, PeftLoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False))
    made.eval().save_pretrained(tmp_path / "made")
    await caller.create_run(alpha=6.0)
    volume = cluster.trainer.plan.environment["PACELINE_TRAINER_CHECKPOINT_DIR"]
    arguments = ["--checkpoint-dir", volume, "--run", caller.run_id, "--name", "made"]
    command = [
        sys.executable,
        "-m",
        "paceline.services",
        "trainer_service.import_adapter",
        str(tmp_path / "made"),
        *arguments,
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    path = (await process.communicate())[0].decode().strip()
    assert path == f"paceline://{caller.run_id}/sampler/made"
    await caller.load(path)
    datum = SFT_DATUM
    logits = made(input_ids=torch.from_numpy(datum.model_input.astype(np.int64))[None]).logits[0].log_softmax(-1)
    expected = logits.detach().numpy()[np.arange(6), datum.loss_fn_inputs["target_tokens"]]
    counted = datum.loss_fn_inputs["mask"] == 1
    np.testing.assert_allclose((await caller.logprobs())[counted], expected[counted], rtol=1e-4, atol=1e-4)
    before = (await caller.forward_backward()).metrics["loss:sum"]
    assert (await caller.optim_step()).step == 1
    assert (await caller.forward_backward(forward_only=True)).metrics["loss:sum"] < before


async def test_a_watching_sampler_hears_of_a_version_fetches_it_and_its_acknowledgement_ends_the_publish(
    caller, channel, credential
):
    await caller.train()
    metadata = peer_metadata(credential)
    watch = caller.weights.WatchVersions(metadata=metadata)
    await watch.write(weights_pb.WatchVersionsRequest(hello=weights_pb.Hello(sampler_id="one")))
    publishing = asyncio.create_task(caller.publish(wait_for=pb.ACK_POLICY_ALL, ack_timeout_ms=20_000))
    manifest = None
    while manifest is None or manifest.model.run_id != caller.run_id:
        manifest = (await watch.read()).announcement.manifest
    ref = model_pb2.ModelRef(version=model_pb2.VersionRef(run_id=caller.run_id, version=1))
    parts = [
        part async for part in caller.weights.FetchVersion(weights_pb.FetchVersionRequest(model=ref), metadata=metadata)
    ]
    received = b"".join(part.chunk.data for part in parts[1:])
    digest = blake3(received).hexdigest()
    request = weights_pb.FetchVersionRequest(model=ref, accept_staged_path=True)
    _, staged = [part async for part in caller.weights.FetchVersion(request, metadata=metadata)]
    assert await asyncio.to_thread(Path(staged.staged_path).read_bytes) == received
    owners = [part async for part in caller.weights.FetchVersion(request, metadata=caller.metadata)]
    assert b"".join(part.chunk.data for part in owners[1:]) == received
    assert parts[0].manifest.model.blake3 == manifest.model.blake3 == digest
    assert not publishing.done()
    ack = weights_pb.Acknowledgement(run_id=caller.run_id, version=1, blake3=digest, sampler_id="one")
    await watch.write(weights_pb.WatchVersionsRequest(acknowledgement=ack))
    reply = await publishing
    assert [ack.sampler_id for ack in reply.acknowledgements] == ["one"]
    assert reply.model.version == 1
    watch.cancel()


async def test_a_version_is_copied_at_once_for_a_sampler_that_needs_the_volume(caller, channel, credential):
    watch = caller.weights.WatchVersions(metadata=peer_metadata(credential))
    hello = weights_pb.Hello(sampler_id="one", needs_volume=True)
    await watch.write(weights_pb.WatchVersionsRequest(hello=hello))

    async def announced():
        while True:
            announcement = (await watch.read()).announcement
            if announcement.manifest.model.run_id == caller.run_id:
                return announcement

    async def seconds_to_volume():
        publishing = asyncio.create_task(caller.publish(wait_for=pb.ACK_POLICY_ALL, ack_timeout_ms=60_000))
        first, start = await announced(), perf_counter()
        on_volume, seconds = await announced(), perf_counter() - start
        assert (first.volume_path, on_volume.manifest) == ("", first.manifest)
        model = on_volume.manifest.model
        ack = weights_pb.Acknowledgement(run_id=caller.run_id, version=model.version, blake3=model.blake3)
        await watch.write(weights_pb.WatchVersionsRequest(acknowledgement=ack))
        assert len((await publishing).acknowledgements) == 1
        return seconds

    # Without the flag none would be copied earlier; with it, one is on however slow a machine.
    assert any([await seconds_to_volume() < ANSWER_SECONDS for _ in range(10)])
    watch.cancel()


async def test_a_publish_that_nobody_acknowledges_times_out_and_the_version_exists(caller):
    with pytest.raises(errors.AckTimeout):
        await caller.publish(wait_for=pb.ACK_POLICY_ANY, ack_timeout_ms=50)
    assert (await caller.get_run()).latest_version == 1


async def test_tenants_may_not_watch(caller, channel, credential):
    watch = caller.weights.WatchVersions(metadata=caller.metadata)
    await watch.write(weights_pb.WatchVersionsRequest(hello=weights_pb.Hello(sampler_id="spy")))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await watch.read()
    assert isinstance(error_from_rpc(failure.value), errors.MissingCredential)


async def test_old_versions_are_dropped_unless_a_sampler_holds_them(caller, cluster, credential):
    watch = caller.weights.WatchVersions(metadata=peer_metadata(credential))
    await watch.write(weights_pb.WatchVersionsRequest(hello=weights_pb.Hello(sampler_id="holder")))
    published = await caller.publish(durable=True)
    ack = weights_pb.Acknowledgement(
        run_id=caller.run_id, version=1, blake3=published.model.blake3, sampler_id="holder"
    )
    await watch.write(weights_pb.WatchVersionsRequest(acknowledgement=ack))
    folder = cluster.state / "checkpoints" / "runs" / caller.run_id / "versions"
    for _ in range(4):
        await caller.publish(durable=True)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "4", "5"]
    watch.cancel()


async def test_versions_that_are_published_together_all_become_durable_and_the_old_ones_go(caller, cluster):
    folder = cluster.state / "checkpoints" / "runs" / caller.run_id / "versions"
    for burst in range(1, 9):
        published = await asyncio.gather(*(caller.publish(durable=True) for _ in range(8)))
        assert [reply.model.version for reply in published] == list(range(8 * burst - 7, 8 * burst + 1))
    assert {"63", "64"} == {path.name for path in folder.glob("[0-9]*")}


async def test_a_dead_engine_costs_a_delay_and_no_step(caller, cluster):
    reference = await _reference(caller)
    await caller.create_run()
    await caller.train(2)
    cluster.trainer.kill_engine()
    await _when_available(caller.forward_backward)
    step = await _when_available(caller.optim_step)
    assert (step.step, step.grad_norm) == (3, reference.grad_norm)


async def test_a_killed_trainer_costs_a_delay_and_no_step_and_no_version_number_is_used_twice(caller, cluster):
    reference = await _reference(caller)
    await caller.create_run()
    await caller.train(2)
    published = await caller.publish()
    before = await caller.get_run()
    cluster.trainer.kill()
    cluster.trainer.start()
    after = await caller.get_run()
    before.volume_bytes = after.volume_bytes  # the version may have reached the volume since
    assert after == before
    await caller.forward_backward()
    step = await caller.optim_step()
    assert (step.step, step.grad_norm) == (3, reference.grad_norm)
    assert await _weights_hash(caller, published.model.version) == published.model.blake3
    assert (await caller.publish()).model.version == published.model.version + 1


async def test_a_command_repeated_after_a_restart_gets_the_first_answer_and_another_payload_is_refused(caller, cluster):
    await caller.forward_backward()
    first = await caller.optim_step()
    with pytest.raises(errors.NoGradient):
        await caller.optim_step()
    cluster.trainer.kill()
    cluster.trainer.start()
    caller.seq_id = 1
    assert await caller.optim_step() == first
    with pytest.raises(errors.NoGradient):
        await caller.optim_step()
    caller.seq_id = 1
    with pytest.raises(errors.SeqIdReused):
        await caller.forward_backward()
    assert (await caller.get_run()).step == 1


async def test_a_deleted_run_stays_deleted_across_a_restart(caller, cluster):
    request = pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=lora_pb2.LoraConfig(rank=4))
    caller.run_id, caller.seq_id = (await caller.call("CreateRun", request)).run.run_id, 0
    await caller.train()
    await caller.call("DeleteRun", pb.DeleteRunRequest(run_id=caller.run_id))
    cluster.trainer.kill()
    cluster.trainer.start()
    caller.seq_id = 1
    with pytest.raises(errors.RunNotFound):
        await caller.optim_step()
    with pytest.raises(errors.RunNotFound):
        await caller.call("CreateRun", request)


async def test_a_checkpoint_of_a_deleted_run_makes_a_run_like_it(caller, channel, credential, cluster):
    lora = lora_pb2.LoraConfig(rank=3, alpha=5.0, seed=7, layers=[1])
    made = pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=lora, user_metadata={"purpose": "test"})
    caller.run_id, caller.seq_id = (await caller.call("CreateRun", made)).run.run_id, 0
    await caller.train(2)
    path = (await caller.save("kept")).path
    weights_path = (await caller.save("weights", pb.CHECKPOINT_KIND_SAMPLER)).path
    expected = await caller.train()
    await caller.call("DeleteRun", pb.DeleteRunRequest(run_id=caller.run_id))
    cluster.trainer.kill()
    cluster.trainer.start()
    for like in (path, weights_path):
        request = pb.CreateRunRequest(request_id=os.urandom(8).hex(), like_checkpoint=like)
        run = (await caller.call("CreateRun", request)).run
        assert (run.lora.rank, run.lora.alpha, run.lora.seed, list(run.lora.layers)) == (3, 5.0, 7, [1])
        assert dict(run.user_metadata) == {"purpose": "test"}
        caller.run_id, caller.seq_id = run.run_id, 0
        await caller.load(like, with_optimizer=like == path)
        await caller.forward_backward()
        assert (await caller.optim_step()).step == (expected.step if like == path else 1)
    assert (await caller.call("CreateRun", request)).run.run_id == run.run_id
    stranger = Caller(channel, credential, "stranger")
    with pytest.raises(errors.CheckpointNotFound) as caught:
        await stranger.call("CreateRun", pb.CreateRunRequest(request_id="x", like_checkpoint=path))
    assert caught.value.field == "like_checkpoint"


async def test_a_damaged_journal_loses_its_run_alone_which_goes_on_from_a_checkpoint(
    caller, cluster, channel, credential
):
    other = await Caller(channel, credential, "team").create_run()
    await other.train()
    await caller.train(2)
    checkpoint = await caller.save("kept")
    straight = await caller.train(1)
    cluster.trainer.kill()
    (journal,) = (cluster.state / "checkpoints" / "runs" / caller.run_id / "journal").iterdir()
    data = bytearray(journal.read_bytes())
    data[70] ^= 1  # in the first frame
    journal.write_bytes(data)
    cluster.trainer.start()
    assert (await other.train()).step == 2
    with pytest.raises(errors.RunStateLost) as caught:
        await caller.forward_backward()
    assert caught.value.metadata["checkpoint"] == checkpoint.path
    await caller.load(checkpoint.path, with_optimizer=True)
    assert (await caller.train(1)).grad_norm == straight.grad_norm
    cluster.trainer.kill()
    cluster.trainer.start()
    assert (await caller.train(1)).step == 4


async def _reference(caller):
    return await caller.train(3)


async def _weights_hash(caller, version):
    ref = model_pb2.ModelRef(version=model_pb2.VersionRef(run_id=caller.run_id, version=version))
    request = weights_pb.FetchVersionRequest(model=ref)
    parts = [part async for part in caller.weights.FetchVersion(request, metadata=caller.metadata)]
    return blake3(b"".join(part.chunk.data for part in parts[1:])).hexdigest()


def _place(run):
    """Return the newest executed command of a run, and the step and the waiting gradient after it."""
    return run.executed_seq_id, run.step, run.gradient_tokens


async def _when_available(call):
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except errors.Unavailable:
                caller = call.__self__
                caller.seq_id -= 1
                await asyncio.sleep(0.1)
