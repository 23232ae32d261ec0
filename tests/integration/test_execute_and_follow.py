"""What becomes of a command is told by a running trainer: Execute, Follow, and what a client finds that attaches."""

import asyncio
import os
import re

import grpc
import pytest
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.cluster import Cluster

import paceline
from paceline import codec, errors
from paceline.codec.errors import error_from_proto
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import API_KEY_KEY, peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Datum
from paceline.types.v1 import lora_pb2

pytestmark = pytest.mark.services

DATUM = codec.datum_to_proto(Datum.from_completion([1, 2, 3, 4], [5, 6, 7]))
PASS = pb.ForwardBackwardRequest(data=[DATUM], loss_fn="cross_entropy")
LONG_PASS = pb.ForwardBackwardRequest(
    data=[codec.datum_to_proto(Datum.from_completion(list(range(1, 100)), [5] * 100))] * 80, loss_fn="cross_entropy"
)
BAD_PASS = pb.ForwardBackwardRequest(data=[DATUM], loss_fn="no_such_loss")
STEP = pb.OptimStepRequest()
STEP.adamw.learning_rate = 1e-2
ENDED = {pb.COMMAND_STATE_SUCCEEDED, pb.COMMAND_STATE_REFUSED, pb.COMMAND_STATE_NOT_ARRIVED}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    state = tmp_path_factory.mktemp("trainer")
    cluster = Cluster.make(state, make_tiny_llama(state / "model"), PACELINE_TRAINER_GAP_WAIT_SECONDS="5")
    with cluster.running(cluster.trainer, cluster.gateway):
        yield cluster


class Client:
    """A tenant's connection to the trainer, and a run of its own."""

    def __init__(self, channel, metadata):
        self.stub, self.metadata = TrainerServiceStub(channel), metadata

    async def create(self):
        request = pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=lora_pb2.LoraConfig(rank=4))
        self.run_id = (await self.call("CreateRun", request)).run.run_id
        return self

    async def call(self, method, request):
        try:
            return await getattr(self.stub, method)(request, metadata=self.metadata, timeout=PATIENCE)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    def request(self, seq_id, command, **fields):
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(command).__name__.removesuffix("Request")).lower()
        return pb.ExecuteRequest(run_id=self.run_id, seq_id=seq_id, **{name: command}, **fields)

    async def execute(self, seq_id, command, **fields):
        """Return the statuses of a command, to the end of the stream."""
        return await self.statuses(self.stub.Execute, self.request(seq_id, command, **fields))

    async def follow(self, *seq_ids, **fields):
        request = pb.FollowRequest(run_id=self.run_id, seq_ids=seq_ids, **fields)
        return await self.statuses(self.stub.Follow, request)

    async def statuses(self, method, request):
        try:
            return [reply.status async for reply in method(request, metadata=self.metadata, timeout=PATIENCE)]
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    async def attach(self, **fields):
        request = pb.AttachRunRequest(**{"run_id": self.run_id, "request_id": os.urandom(8).hex(), **fields})
        return await self.call("AttachRun", request)

    async def get_run(self):
        return (await self.call("GetRun", pb.GetRunRequest(run_id=self.run_id))).run


@pytest.fixture
async def client(cluster):
    async with open_channel(cluster.trainer.plan.environment["PACELINE_TRAINER_LISTEN"]) as channel:
        yield await Client(channel, peer_metadata((cluster.state / "credential").read_text(), "team")).create()


@pytest.fixture
async def at_gateway(cluster):
    async with open_channel(cluster.address) as channel:
        yield await Client(channel, ((API_KEY_KEY, f"Bearer {cluster.api_key}"),)).create()


@pytest.fixture(params=["trainer", "gateway"])
def either(request, client, at_gateway):
    return client if request.param == "trainer" else at_gateway


async def test_a_command_is_followed_from_acceptance_to_its_reply(either):
    client = either
    passed = await client.execute(1, PASS)
    assert passed[0].state in {pb.COMMAND_STATE_ACCEPTED, pb.COMMAND_STATE_EXECUTING, pb.COMMAND_STATE_SUCCEEDED}
    assert passed[-1].state == pb.COMMAND_STATE_SUCCEEDED
    assert passed[-1].forward_backward.metrics["tokens:sum"] == 3
    accepted = await client.execute(2, STEP, max_seconds=0)
    assert len(accepted) == 1
    stepped = (await client.follow(2))[-1]
    assert (stepped.state, stepped.optim_step.step) == (pb.COMMAND_STATE_SUCCEEDED, 1)
    assert (await client.follow(2, max_seconds=0))[0] == stepped


async def test_what_a_command_answers_is_a_field_and_what_the_call_answers_an_error(client):
    refused = (await client.execute(1, BAD_PASS))[-1]
    assert refused.state == pb.COMMAND_STATE_REFUSED
    error = error_from_proto(refused.error)
    assert isinstance(error, errors.UnknownLoss)
    assert error.field == "loss_fn"
    with pytest.raises(errors.UnknownLoss):  # the blocking call of the same command
        await client.call(
            "ForwardBackward",
            pb.ForwardBackwardRequest(run_id=client.run_id, seq_id=1, data=[DATUM], loss_fn="no_such_loss"),
        )
    with pytest.raises(errors.MissingField):
        await client.statuses(client.stub.Execute, pb.ExecuteRequest(run_id=client.run_id, seq_id=2))
    with pytest.raises(errors.InvalidArgument) as caught:
        await client.execute(2, pb.ForwardBackwardRequest(seq_id=2, data=[DATUM], loss_fn="cross_entropy"))
    assert caught.value.field == "forward_backward.seq_id"
    with pytest.raises(errors.RunNotFound):
        await client.statuses(client.stub.Follow, pb.FollowRequest(run_id="run-" + "0" * 32))
    (free,) = await client.follow(2, max_seconds=0)
    assert free.state == pb.COMMAND_STATE_NOT_ARRIVED


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_seconds": float("nan")}, errors.NonFinite),
        ({"max_seconds": -1}, errors.OutOfRange),
        ({"max_seconds": 1e300}, errors.OutOfRange),
        ({"attachment": 2 * 10**15}, errors.OutOfRange),
        ({"seq_id": 2**64 - 1}, errors.OutOfRange),
        ({"run_id": "r" * 1000}, errors.OutOfRange),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_call_beyond_its_bounds_is_refused_and_its_command_does_not_arrive(client, fields, error):
    request = client.request(1, PASS)
    for name, value in fields.items():
        setattr(request, name, value)
    with pytest.raises(error) as caught:
        await client.statuses(client.stub.Execute, request)
    assert caught.value.field == next(iter(fields))
    if "max_seconds" not in fields:  # the same of the command's own call
        place = {"run_id": client.run_id, "seq_id": 1, **fields}
        with pytest.raises(error):
            await client.call("OptimStep", pb.OptimStepRequest(adamw=STEP.adamw, **place))
    (free,) = await client.follow(1, max_seconds=0)
    assert free.state == pb.COMMAND_STATE_NOT_ARRIVED


async def test_commands_are_numbered_from_one(client):
    with pytest.raises(errors.OutOfRange) as caught:
        await client.follow(1, 0)
    assert caught.value.field == "seq_ids[1]"


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (pb.ForwardBackwardRequest(data=[DATUM], loss_fn="no_such_loss"), "loss_fn"),
        (pb.OptimStepRequest(), "adamw"),
        (pb.OptimStepRequest(adamw=pb.AdamwParams(beta1=2)), "adamw.beta1"),
        (pb.OptimStepRequest(adamw=STEP.adamw, only_if_succeeded_since=9), "only_if_succeeded_since"),
        (pb.SaveCheckpointRequest(name="kept"), "kind"),
        (pb.SaveCheckpointRequest(name=".kept", kind=pb.CHECKPOINT_KIND_STATE), "name"),
        (pb.SaveCheckpointRequest(name="kept", kind=pb.CHECKPOINT_KIND_STATE, ttl_seconds=0), "ttl_seconds"),
        (pb.LoadCheckpointRequest(path="kept"), "path"),
        (pb.PublishWeightsRequest(wait_for=7), "wait_for"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__.removesuffix("Request"),
)
async def test_what_a_request_alone_tells_is_refused_before_its_turn(client, command, field):
    await client.execute(1, LONG_PASS, max_seconds=0)
    (refused,) = await client.execute(2, command, max_seconds=0)
    assert refused.state == pb.COMMAND_STATE_REFUSED
    assert error_from_proto(refused.error).field == field
    (first,) = await client.follow(1, max_seconds=0)
    assert first.state in {pb.COMMAND_STATE_ACCEPTED, pb.COMMAND_STATE_EXECUTING}


async def test_a_seq_id_of_another_command_is_told_without_its_answer(client):
    mine = (await client.execute(1, PASS))[-1]
    (another,) = await client.execute(1, STEP)
    assert another.is_another
    assert another.digest == mine.digest
    assert another.WhichOneof("answer") is None


async def test_a_dropped_stream_does_not_drop_the_command(client):
    call = client.stub.Execute(client.request(1, LONG_PASS), metadata=client.metadata, timeout=PATIENCE)
    await call.read()
    call.cancel()
    assert (await client.follow(1))[-1].state == pb.COMMAND_STATE_SUCCEEDED


async def test_states_go_on_over_the_engines_death_and_the_trainers(client, cluster):
    await client.execute(1, LONG_PASS, max_seconds=0)
    await client.execute(2, STEP, max_seconds=0)
    cluster.trainer.kill_engine()
    assert (await client.follow(2))[-1].optim_step.step == 1
    await client.execute(3, LONG_PASS, max_seconds=0)
    await client.execute(4, STEP, max_seconds=0)
    await asyncio.to_thread(cluster.trainer.kill)
    await asyncio.to_thread(cluster.trainer.start)
    found = {status.seq_id: status for status in await client.follow(3, 4)}
    assert [found[3].state, found[4].optim_step.step] == [pb.COMMAND_STATE_SUCCEEDED, 2]


@pytest.mark.parametrize(
    "policy", [pb.OUTSTANDING_POLICY_REPORT, pb.OUTSTANDING_POLICY_WAIT, pb.OUTSTANDING_POLICY_CANCEL]
)
async def test_a_client_that_attaches_learns_what_another_left_and_decides_about_it(client, policy):
    dead = (await client.attach()).attachment
    sent = [LONG_PASS, LONG_PASS, STEP]
    for seq_id, command in enumerate(sent, 1):
        await client.execute(seq_id, command, attachment=dead, max_seconds=0)
    attached = await client.attach(outstanding=policy)
    assert attached.run.last_seq_id == 3
    found = {status.seq_id: status for status in attached.outstanding}
    assert all(status.attachment == dead for status in found.values())
    if policy == pb.OUTSTANDING_POLICY_REPORT:
        assert 3 in found
        assert (await client.follow(3))[-1].optim_step.step == 1
        return
    assert {status.state for status in found.values()} <= ENDED
    assert attached.run.executed_seq_id == 3, "a cancelled command ends before its turn, but has taken its place"
    assert found[3].WhichOneof("answer") in {None, "error"}
    if policy == pb.OUTSTANDING_POLICY_WAIT:
        assert attached.run.step == 1
        return
    assert found[3].state == pb.COMMAND_STATE_REFUSED
    assert isinstance(error_from_proto(found[3].error), errors.CommandCancelled)
    assert attached.run.step == 0
    assert (await client.execute(4, PASS, attachment=attached.attachment))[-1].state == pb.COMMAND_STATE_SUCCEEDED


async def test_a_step_that_depends_on_its_passes_is_not_taken_without_one(client):
    await client.execute(1, PASS)
    await client.execute(2, BAD_PASS)
    step = pb.OptimStepRequest(only_if_succeeded_since=1)
    step.adamw.learning_rate = 1e-2
    refused = error_from_proto((await client.execute(3, step))[-1].error)
    assert isinstance(refused, errors.PrecedingRefused)
    assert refused.metadata == {"seq_id": "2"}
    step.only_if_succeeded_since = 3
    assert (await client.execute(4, step))[-1].optim_step.step == 1
    step.only_if_succeeded_since = 6
    refused = error_from_proto((await client.execute(5, step))[-1].error)
    assert refused.field == "only_if_succeeded_since"
    assert refused.message == "is 6; it must be from 1 to 5"


async def test_the_first_command_of_a_run_is_told_the_one_place_on_which_its_step_can_depend(client):
    refused = error_from_proto((await client.execute(1, pb.OptimStepRequest(only_if_succeeded_since=2)))[-1].error)
    assert refused.message == "is 2; it must be 1"


@pytest.mark.parametrize("outstanding", ["wait", "cancel", "report"])
async def test_the_client_attaches_to_a_run_in_which_nothing_is_under_way(at_gateway, cluster, outstanding):
    await at_gateway.execute(1, PASS)
    for seq_id, command in enumerate([LONG_PASS, LONG_PASS, STEP], 2):
        await at_gateway.execute(seq_id, command, max_seconds=0)
    async with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        training = await service.get_training_client_async(at_gateway.run_id, outstanding=outstanding)
        last = (await at_gateway.follow(4, max_seconds=0))[-1]
        if outstanding == "report":
            assert last.state not in ENDED
            await at_gateway.follow(4)
        else:
            assert last.state == {"wait": pb.COMMAND_STATE_SUCCEEDED, "cancel": pb.COMMAND_STATE_REFUSED}[outstanding]
        run = await training.get_info_async()
        assert (run.step, run.last_seq_id) == (0 if outstanding == "cancel" else 1, 4)
        assert (await training.forward_backward([Datum.from_completion([1, 2], [3])])).metrics["tokens:sum"] == 1


async def test_a_client_that_waits_to_attach_is_told_that_another_has_attached_since(at_gateway, cluster):
    for seq_id, command in enumerate([LONG_PASS] * 6, 1):
        await at_gateway.execute(seq_id, command, max_seconds=0)
    async with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        waiting = asyncio.ensure_future(service.get_training_client_async(at_gateway.run_id))
        attached = 1
        while (await at_gateway.attach()).attachment == attached:  # the other one has not attached yet
            attached += 1
        with pytest.raises(errors.ClientSuperseded):
            await waiting
    newest = await at_gateway.attach(request_id="newest")
    assert (await at_gateway.attach(request_id="newest")).attachment == newest.attachment
    await at_gateway.attach()
    with pytest.raises(errors.ClientSuperseded):
        await at_gateway.attach(request_id="newest")


async def test_what_to_do_about_what_is_left_is_one_of_three(at_gateway, cluster):
    async with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        with pytest.raises(errors.InvalidArgument) as caught:
            await service.get_training_client_async(at_gateway.run_id, outstanding="drop")
    assert caught.value.field == "outstanding"
