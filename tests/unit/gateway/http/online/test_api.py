"""Online training over HTTP, with a trainer that keeps the order of commands and computes nothing."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from support.fates import with_fates
from support.patience import PATIENCE

from gateway.http.apis import make_app
from gateway.http.online import store
from gateway.http.online.api import OnlineApi
from paceline import errors
from paceline.requests.waiting_bytes import CALLS, WaitingBytes
from paceline.rpc.identity import Identity
from paceline.trainer.v1 import trainer_service_pb2 as pb

SMALL, LARGE = 100, 5000
LORA = {"rank": 2}


class Trainer:
    """Renders a conversation to one datum of as many bytes as its response has characters."""

    def __init__(self):
        self.waiting_bytes = WaitingBytes()
        self.most_bytes = 1 << 20
        """Longer messages are refused unread."""
        self.runs = {}
        """The number of the last command of each run."""
        self.made = 0
        self.is_full = False
        self.trained = []
        """The sizes of the examples of each batch."""
        self.gradient = []
        self.kinds = []
        """Kinds of the commands that were executed."""
        self.answers, self.creates = asyncio.Event(), asyncio.Event()
        """Set while commands are answered, and runs created."""
        self.answers.set()
        self.creates.set()

    async def call(self, tenant, request, reply, **_):
        await asyncio.sleep(0)
        if isinstance(request, pb.RenderConversationsRequest):
            found = pb.RenderConversationsResponse()
            for index, conversation in enumerate(request.conversations):
                text = json.loads(conversation)["messages"][-1]["content"]
                if not text:
                    raise errors.InvalidArgument("is empty", field=f"conversations[{index}].messages[1].content")
                found.conversations.add().data.add().model_input.data = text.encode()
            return found
        if isinstance(request, pb.CreateRunRequest):
            if self.is_full:
                raise errors.TooManyRuns("too many runs")
            self.made += 1
            run_id = f"run-{self.made}"
            await self.creates.wait()
            self.runs[run_id] = 0
            return pb.CreateRunResponse(run={"run_id": run_id})
        if request.run_id not in self.runs:
            raise errors.RunNotFound("no such run")
        if isinstance(request, pb.AttachRunRequest):
            run = {"run_id": request.run_id, "last_seq_id": self.runs[request.run_id], "latest_version": 1}
            return pb.AttachRunResponse(attachment=1, run=run)
        raise AssertionError(f"{type(request).__name__} is no command")

    async def execute(self, tenant, command, **_):
        return await with_fates(self._execute(command))

    async def _execute(self, request):
        await asyncio.sleep(0)
        if request.ByteSize() > self.most_bytes and isinstance(request, pb.ForwardBackwardRequest):
            raise errors.MessageTooLarge("Received message larger than max")
        if request.run_id not in self.runs:
            raise errors.RunNotFound("no such run")
        if request.seq_id != self.runs[request.run_id] + 1:
            raise errors.SeqIdGap("earlier commands are missing")
        self.runs[request.run_id] += 1
        self.kinds.append(type(request).__name__.removesuffix("Request"))
        await self.answers.wait()
        if isinstance(request, pb.ForwardBackwardRequest):
            self.gradient = [len(datum.model_input.data) for datum in request.data]
            return pb.ForwardBackwardResponse(metrics={"loss:sum": 1.0})
        if isinstance(request, pb.OptimStepRequest):
            self.trained.append(self.gradient)
            return pb.OptimStepResponse(step=len(self.trained), tokens=1)
        if isinstance(request, pb.PublishWeightsRequest):
            return pb.PublishWeightsResponse(model={"version": self.kinds.count("PublishWeights")})
        return pb.SaveCheckpointResponse(checkpoint={"path": f"paceline://{request.run_id}/state/{request.name}"})


class Models:
    """A sampler that serves adapters of one base model, and the trainer's runs."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.answers = asyncio.Event()
        """Set while the sampler answers."""
        self.answers.set()

    async def served(self, tenant, name):
        await self.answers.wait()
        return "base"

    async def runs(self, tenant):
        return [SimpleNamespace(run_id=run_id) for run_id in self.trainer.runs]

    async def describe_sampler(self, tenant):
        await self.answers.wait()
        return SimpleNamespace(model=SimpleNamespace(max_lora_rank=16), serves="adapters")

    def base_names(self, info):
        return ("base",)


@pytest.fixture
def trainer():
    return Trainer()


@pytest.fixture
def models(trainer):
    return Models(trainer)


@pytest.fixture
async def api(trainer, models, tmp_path):
    api = OnlineApi(trainer, models, tmp_path, 1 << 20, most_waiting_bytes=100 * LARGE)
    yield api
    trainer.answers.set()
    await api.stop()


@pytest.fixture
def app(api) -> FastAPI:
    return make_app(api.routes())


class Caller:
    """Who waits for an answer, and may leave."""

    def __init__(self):
        self.waits, self.leaves = asyncio.Event(), asyncio.Event()
        """Set once the request is being answered, and when the caller leaves."""


async def ask(app, method, path, body=None, caller=None):
    """Send a request; return the status and the body of the answer."""
    caller = caller or Caller()
    path, _, query = path.partition("?")
    messages, sent = iter([{"type": "http.request", "body": json.dumps(body or {}).encode()}]), []
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": query.encode()}
    scope |= {"headers": [], "state": {"identity": Identity("tenant")}}

    async def receive():
        if (message := next(messages, None)) is None:
            caller.waits.set()
            await caller.leaves.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


async def train(app, *sizes, letter="a", **options):
    """Post examples of these sizes."""
    pairs = [{"prompt": "p", "response": letter * size} for size in sizes]
    return await ask(app, "POST", "/train", {"pairs": pairs, "lora": LORA, **options})


async def trained(app, model="online"):
    """Wait until nothing of a model is trained; return its status."""
    path = f"/train/status?model={model}"
    while (status := (await ask(app, "GET", path))[1])["state"] == "training":  # noqa: ASYNC110 - as callers do
        await asyncio.sleep(0.001)
    return status


async def test_an_example_above_the_trainers_limit_fails_and_those_behind_it_are_trained_on(app, trainer):
    trainer.most_bytes = LARGE
    for size in (SMALL, LARGE, SMALL + 1, SMALL + 2):
        assert (await train(app, size, batch_size=1))[0] == 202
    status = await trained(app)
    assert (status["state"], status["waiting"], status["trained"], status["failed"]) == ("idle", 0, 3, 1)
    assert trainer.trained == [[SMALL], [SMALL + 1], [SMALL + 2]]
    assert "larger than max" in status["problem"]
    trainer.most_bytes = 2 * LARGE
    assert (await train(app, LARGE))[1]["accepted"] == 1, "it had no effect"
    assert (await trained(app))["trained"] == 4


async def test_a_pair_that_cannot_be_rendered_is_named_as_it_was_sent(app):
    conversation = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
    status, answer = await train(app, SMALL, 0, conversations=[conversation])
    assert (status, answer["error"]["param"]) == (400, "pairs[1].response")


async def test_a_batch_above_the_trainers_limit_is_split(app, trainer):
    trainer.most_bytes = 3 * LARGE
    await train(app, LARGE, LARGE + 1, LARGE + 2, SMALL, SMALL + 1)
    status = await trained(app)
    assert (status["trained"], status["failed"], status["problem"]) == (5, 0, None)
    assert trainer.trained == [[LARGE], [LARGE + 1], [LARGE + 2, SMALL, SMALL + 1]]


async def test_only_the_example_above_the_limit_of_a_batch_fails(app, trainer):
    trainer.most_bytes = LARGE
    await train(app, SMALL, LARGE, SMALL + 1)
    status = await trained(app)
    assert (status["trained"], status["failed"]) == (2, 1)
    assert trainer.trained == [[SMALL], [SMALL + 1]]


async def test_the_last_steps_have_a_version_though_the_example_behind_them_failed(app, trainer):
    trainer.most_bytes = LARGE
    trainer.answers.clear()
    await train(app, SMALL, SMALL + 1, LARGE, batch_size=1)
    trainer.answers.set()
    await trained(app)
    assert trainer.kinds[-2:] == ["OptimStep", "PublishWeights"]


async def test_examples_that_come_while_the_learner_finds_none_are_trained_on(app, api, trainer, monkeypatch):
    find, letters = api.store.next_batch, iter("bc")

    async def find_slowly(*arguments):
        if not (batch := await find(*arguments)) and (letter := next(letters, "")):
            await train(app, SMALL, letter=letter)
        return batch

    monkeypatch.setattr(api.store, "next_batch", find_slowly)
    await train(app, SMALL)
    assert (await trained(app))["trained"] == 3


async def test_examples_that_are_rendered_at_the_same_time_count_together(app, trainer):
    trainer.answers.clear()
    size = 15 * LARGE  # six requests fit
    calls = (train(app, size, letter=letter, model=f"{letter}-model") for letter in "abcdefghij")
    statuses = [status for status, _ in await asyncio.gather(*calls)]
    assert sorted(statuses) == 6 * [202] + 4 * [429]
    assert (await train(app, size, letter="k"))[0] == 429, "those that were stored wait"
    assert (await train(app, SMALL, letter="k"))[0] == 202, "those that were refused do not"


async def test_rendered_examples_count_before_they_are_stored(app, trainer):
    trainer.creates.clear()
    waiting = asyncio.create_task(train(app, 60 * LARGE))
    while not trainer.made:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    assert (await train(app, 60 * LARGE, letter="b"))[0] == 429
    trainer.creates.set()
    assert (await waiting)[0] == 202
    await trained(app)
    assert (await train(app, 60 * LARGE, letter="b"))[0] == 202


async def test_rendered_examples_count_as_calls_until_they_are_stored(app, trainer):
    trainer.waiting_bytes = WaitingBytes(tenant_limit=2 * LARGE, quota=CALLS)
    status, answer = await train(app, LARGE, LARGE, LARGE)
    assert (status, answer["error"]["code"]) == (413, "MESSAGE_TOO_LARGE"), "waiting would not help"
    with trainer.waiting_bytes.waiting("tenant", 2 * LARGE):
        status, answer = await train(app, LARGE)
    assert (status, answer["error"]["code"]) == (429, "QUOTA_EXCEEDED")
    assert (await train(app, LARGE))[0] == 202
    assert trainer.waiting_bytes.used("tenant") == 0


async def executing(trainer, kind):
    while kind not in trainer.kinds:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)


async def test_no_checkpoint_is_saved_for_a_caller_who_left_while_a_batch_was_trained_on(app, trainer):
    trainer.answers.clear()
    await train(app, SMALL)
    await executing(trainer, "ForwardBackward")
    caller = Caller()
    saving = asyncio.create_task(ask(app, "POST", "/checkpoint", caller=caller))
    async with asyncio.timeout(PATIENCE):
        await caller.waits.wait()
        caller.leaves.set()
        assert (await saving)[1]["error"]["code"] == "CANCELLED"
    trainer.answers.set()
    assert (await trained(app))["trained"] == 1
    assert await ask(app, "POST", "/checkpoint", {"name": "mine"}) == (
        200,
        {"model": "online", "path": "paceline://run-1/state/mine", "step": 1},
    )
    assert trainer.kinds.count("SaveCheckpoint") == 1


async def test_a_checkpoint_that_is_being_saved_ends_though_its_caller_leaves(app, trainer):
    await train(app, SMALL)
    await trained(app)
    trainer.answers.clear()
    caller = Caller()
    saving = asyncio.create_task(ask(app, "POST", "/checkpoint", caller=caller))
    await executing(trainer, "SaveCheckpoint")
    caller.leaves.set()
    async with asyncio.timeout(PATIENCE):
        await saving
    await train(app, SMALL + 1)
    assert (await ask(app, "GET", "/train/status"))[1]["waiting"] == 1
    assert trainer.kinds[-1] == "SaveCheckpoint", "what comes next waits for it"
    trainer.answers.set()
    status = await trained(app)
    assert (status["trained"], status["problem"]) == (2, None)
    assert trainer.kinds.count("SaveCheckpoint") == 1, "it was answered, and is not sent again"


async def test_examples_that_waited_for_a_deleted_run_are_trained_on_by_the_next(app, trainer):
    await train(app, SMALL, optimizer="adamw")
    await trained(app)
    trainer.runs.clear()
    await train(app, SMALL + 1)
    stopped = await trained(app)
    assert (stopped["state"], stopped["waiting"]) == ("stopped", 1)
    _, answer = await train(app, SMALL, SMALL + 1, SMALL + 2, lora=None)
    assert (answer["run_id"], answer["accepted"], answer["duplicates"]) == ("run-2", 2, 1)
    status = await trained(app)
    assert (status["waiting"], status["trained"], status["optimizer"], status["lora"]) == (0, 3, "adamw", LORA)
    assert trainer.trained == [[SMALL], [SMALL + 1, SMALL, SMALL + 2]]


async def test_they_wait_on_while_no_run_can_be_created(app, trainer):
    await train(app, SMALL)
    await trained(app)
    trainer.runs.clear()
    await train(app, SMALL + 1)
    await trained(app)
    trainer.is_full = True
    for lora in (LORA, {"rank": 4}, None):
        assert (await train(app, SMALL + 2, lora=lora))[1]["error"]["code"] == "TOO_MANY_RUNS"
    trainer.is_full = False
    assert (await train(app, SMALL + 2, lora=None))[1]["accepted"] == 1
    status = await trained(app)
    assert (status["trained"], status["lora"]) == (2, {"rank": 4})
    assert trainer.trained == [[SMALL], [SMALL + 1, SMALL + 2]]


async def test_a_batch_whose_run_was_deleted_before_its_step_waits(app, trainer):
    trainer.answers.clear()
    await train(app, SMALL)
    while not trainer.kinds:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    trainer.runs.clear()
    trainer.answers.set()
    status = await trained(app)
    assert (status["state"], status["waiting"], status["failed"]) == ("stopped", 1, 0)
    assert (await train(app, SMALL))[1]["duplicates"] == 1
    assert (await trained(app))["trained"] == 1


async def test_a_model_is_trained_while_the_sampler_does_not_answer(app, models):
    await train(app, SMALL)
    models.answers.clear()
    async with asyncio.timeout(PATIENCE):
        assert (await train(app, SMALL + 1))[0] == 202
        assert (await trained(app))["trained"] == 2


async def test_a_rank_that_the_sampler_does_not_serve_is_refused_before_a_run_is_made(app, trainer):
    status, answer = await train(app, SMALL, lora={"rank": 17})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "RANK_TOO_LARGE", "lora.rank")
    assert trainer.made == 0


async def test_a_first_request_that_is_refused_leaves_no_settings(app, trainer):
    trainer.is_full = True
    await train(app, SMALL, optimizer="adamw")
    trainer.is_full = False
    await train(app, SMALL)
    assert (await trained(app))["optimizer"] == "apollo_mini"


async def test_models_whose_runs_were_deleted_are_forgotten_unless_examples_wait(app, api, trainer, monkeypatch):
    monkeypatch.setattr(store, "MOST_MODELS", 3)
    for name in ("first", "second", "third"):
        assert (await train(app, SMALL, model=name))[0] == 202
        await trained(app, name)
    status, answer = await train(app, SMALL, model="fourth")
    assert (status, answer["error"]["code"]) == (429, "QUOTA_EXCEEDED")
    del trainer.runs["run-1"], trainer.runs["run-2"]
    first = api.store.model("tenant", "first")
    await api.store.add_examples(first, [store.NewExample(b"waits", 1, b"waits")], 1e-4, 1)
    assert (await train(app, SMALL, model="fourth"))[0] == 202
    assert [model.name for model in api.store.models("tenant")] == ["first", "third", "fourth"]
    assert (await ask(app, "GET", "/train/status?model=second"))[0] == 404
