"""How posted training requests are stored and sent: equal bytes for equal requests, each at its place in the order."""

from __future__ import annotations

import asyncio
import gc
import json
import math

import pytest
from support.fates import turned_away
from support.patience import PATIENCE

from gateway.http.tinker import futures as futures_module
from gateway.http.tinker.futures import Futures, Posted, Work
from gateway.http.tinker.names import Aliases, Names
from gateway.http.tinker.retirement import Retirement
from gateway.http.tinker.store import Model, Store
from gateway.http.tinker.tidying import Tidying
from gateway.http.tinker.training import Adam, CreateModel, OptimStep, Training
from paceline import errors
from paceline.layout import new_run_id
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.tinker.v1 import tinker_pb2
from paceline.trainer.v1 import trainer_service_pb2 as pb


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "tinker.sqlite")
    yield store
    store.close()


@pytest.fixture
def waiting():
    return WaitingBytes()


@pytest.fixture
def futures(store, waiting):
    return Futures(store, waiting)


@pytest.fixture
def training(store, futures):
    return training_with(None, store, futures)


def training_with(trainer, store, futures):
    names, retirement, tidying = Names(store), Retirement(None, store), Tidying(None, store)
    return Training(trainer, store, names, Aliases(()), retirement, tidying, futures, 1 << 20)


def test_a_batch_is_stored_with_its_inputs_in_order(training):
    # Otherwise a gateway that has restarted takes a batch that is posted again for another one.
    names = ["target_tokens", "weights", "logprobs", "advantages", "mask", "one", "two", "three"]
    inputs = {name: tinker_pb2.Tensor(dense=name.encode()) for name in names}
    batch = tinker_pb2.ForwardBackwardRequest(model_id="model", data=[tinker_pb2.Datum(loss_fn_inputs=inputs)])
    stored = training.forward_backward.dump(batch)
    assert training.forward_backward.load(stored) == batch
    keys = {name: b"\x0a" + bytes([len(name)]) + name.encode() for name in names}
    assert sorted(names, key=lambda name: stored.index(keys[name])) == sorted(names)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_stored_as_such(training, value):
    # As null it would be the default after a restart, and the step would be taken.
    step = OptimStep(model_id="m", seq_id=1, adam_params=Adam(learning_rate=value), optimizer_params={"eps": value})
    loaded = training.optim_step.load(training.optim_step.dump(step))
    assert str(loaded) == str(step)


def nested(depth):
    return {"inside": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize("metadata", [nested(400), {"text": "\ud800"}], ids=["deep", "half a surrogate pair"])
async def test_what_cannot_be_stored_is_refused(futures, training, metadata):
    request = CreateModel(session_id="s", model_seq_id=0, user_metadata=metadata)
    with pytest.raises(errors.UnreadableMessage):
        await futures.post(training.create_model, "s:train:0:0", "tenant", "s", request)


class Refusing:
    """A trainer that refuses each command whose loss is named, unread, and records what it gets."""

    def __init__(self):
        self.got = []

    async def execute(self, tenant, command, **_):
        self.got.append(command)
        raise turned_away(errors.OutOfRange("too many fields")) if command.loss_fn else errors.EmptyBatch("no data")


async def test_a_batch_that_is_refused_unread_uses_up_its_seq_id(store, futures):
    trainer = Refusing()
    training = training_with(trainer, store, futures)
    await store.add_model(Model("m", "tenant", "s", "run-1", "base", 1, 0.0, 0.0, {}, {}))
    batch = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="ppo")
    with pytest.raises(errors.OutOfRange):
        await training.forward_backward.run("tenant", Posted(batch))
    assert [(request.seq_id, request.loss_fn) for request in trainer.got] == [(7, "ppo"), (7, "")]


class Slow:
    """A trainer whose answer to CreateRun waits until it is let go."""

    def __init__(self):
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def call(self, tenant, request, reply, **_):
        self.asked.set()
        await self.go.wait()
        return reply(run={"run_id": new_run_id(), "base_model": "base", "lora": {"rank": 4}, "state": 1})


async def test_a_run_that_is_created_while_its_session_ends_has_a_model_so_that_it_can_be_deleted(store, futures):
    trainer = Slow()
    training = training_with(trainer, store, futures)
    request = CreateModel(session_id="s", model_seq_id=0, base_model="base")
    await futures.post(training.create_model, "s:train:0:0", "tenant", "s", request)
    await trainer.asked.wait()
    await futures.end_session("s")
    trainer.go.set()
    async with asyncio.timeout(PATIENCE):
        while not store.models("tenant"):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    assert [model.session_id for model in store.models("tenant")] == ["s"]
    await training.close()
    await futures.close()


class Ordered:
    """A trainer that takes a run's commands in their order; it refuses one whose turn has not come at once."""

    def __init__(self):
        self.done, self.go = 1, asyncio.Event()
        self.refused_twice, self._refusals = asyncio.Event(), 0

    async def execute(self, tenant, command, **_):
        if command.seq_id > self.done + 1:
            self._refusals += 1
            if self._refusals == 2:
                self.refused_twice.set()
            missing = {"missing": str(self.done + 1)}
            raise turned_away(errors.SeqIdGap("send it", field="seq_id", metadata=missing))
        await self.go.wait()
        self.done = command.seq_id
        return pb.OptimStepResponse()


@pytest.fixture
async def ordered(store, futures, monkeypatch):
    """A model whose command 1 is the run's command 2, and its trainer; a missing command is not waited for."""
    monkeypatch.setattr(futures_module, "GAP_SECONDS", 0.0)
    trainer = Ordered()
    training = training_with(trainer, store, futures)
    await store.add_model(Model("s:train:0", "tenant", "s", "run-1", "base", 2, 0.0, 0.0, {}, {}))

    async def post(seq_id):
        request = OptimStep(model_id="s:train:0", seq_id=seq_id, adam_params=Adam())
        await futures.post(training.optim_step, f"s:train:0:{seq_id}", "tenant", "s", request)

    yield trainer, post
    await training.close()
    await futures.close()


async def test_a_command_behind_one_that_is_never_posted_fails_and_names_it(futures, ordered):
    _, post = ordered
    await post(2)
    result = await futures.result("tenant", "s:train:0:2", PATIENCE)
    assert json.loads(result.body)["category"] == "user"
    assert "command 1 of the model was not posted" in json.loads(result.body)["error"]


async def test_a_command_behind_one_that_is_posted_waits_for_it(futures, ordered):
    trainer, post = ordered
    await post(1)
    await post(2)
    await asyncio.wait_for(trainer.refused_twice.wait(), PATIENCE)
    trainer.go.set()
    result = await futures.result("tenant", "s:train:0:2", PATIENCE)
    assert json.loads(result.body)["type"] == "optim_step"


class Accepting:
    """A trainer that has each command durable at once, and answers it when it is let go."""

    def __init__(self):
        self.accepted, self.go = asyncio.Event(), asyncio.Event()

    async def execute(self, tenant, command, *, accepted, **_):
        del command
        accepted()
        self.accepted.set()
        await self.go.wait()
        return pb.ForwardBackwardResponse()


async def test_a_batch_is_kept_and_counted_until_the_trainer_has_it(store, futures, waiting):
    trainer = Accepting()
    training = training_with(trainer, store, futures)
    await store.add_model(Model("m", "tenant", "s", "run-1", "base", 1, 0.0, 0.0, {}, {}))
    batch = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    await futures.post(training.forward_backward, "m:1", "tenant", "s", batch)
    del batch
    await asyncio.wait_for(trainer.accepted.wait(), PATIENCE)
    gc.collect()
    assert not [
        one for one in gc.get_objects() if isinstance(one, tinker_pb2.ForwardBackwardRequest) and one.model_id == "m"
    ]
    assert waiting.used("tenant") == 0
    trainer.go.set()
    assert not isinstance(await futures.result("tenant", "m:1", PATIENCE), Work)
    assert waiting.used("tenant") == 0
    await futures.close()
