"""Requests of one MetaClaw session that arrive at the same time."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import FastAPI
from support.fates import with_fates

from gateway.http.edge import most_parts
from gateway.http.metaclaw import sessions
from gateway.http.metaclaw.api import MetaClawApi
from gateway.http.metaclaw.bodies import BATCHES, TrainerBatch
from paceline import errors
from paceline.layout import new_run_id
from paceline.requests.bodies import JsonParts
from paceline.rpc.identity import Identity
from paceline.trainer.v1 import trainer_service_pb2 as pb

RUN, UNKNOWN = new_run_id(), new_run_id()
FULL = errors.Overloaded("too many calls")
turned_away = pytest.mark.parametrize("refusal", [FULL, errors.MissingCredential("is not the trainer's")], ids=repr)


def _content(request):
    """Return what makes a command: who sends it does not."""
    content = type(request).FromString(request.SerializeToString())
    content.ClearField("attachment")
    return content


class Trainer:
    """Numbers attachments and commands as the trainer does, and refuses a learning rate of 0."""

    def __init__(self):
        self.attachments = {}
        self.taken = {}
        self.steps = {}
        """Steps that were taken and answered."""
        self.replies = {}
        self.lost_replies = 0
        """How many of the next replies are lost."""
        self.refusal = None
        """With which commands are turned away."""
        self.is_away = False
        self.answers = asyncio.Event()
        """Set while commands are answered."""
        self.answers.set()

    async def execute(self, tenant, command, **_):
        reply = getattr(pb, type(command).__name__.replace("Request", "Response"))
        return await with_fates(self.call(tenant, command, reply), (errors.OutOfRange, errors.SeqIdReused))

    async def call(self, tenant, request, reply, **_):
        await asyncio.sleep(0)
        if request.run_id == UNKNOWN:
            raise errors.RunNotFound("no such run")
        if self.is_away:
            raise errors.UpstreamUnavailable("the trainer cannot be reached")
        taken = self.taken.setdefault(request.run_id, 0)
        if isinstance(request, pb.AttachRunRequest):
            self.attachments[request.run_id] = self.attachments.get(request.run_id, 0) + 1
            run = {"last_seq_id": taken, "step": self.steps.get(request.run_id, 0)}
            return pb.AttachRunResponse(attachment=self.attachments[request.run_id], run=run)
        if isinstance(request, pb.GetRunRequest):
            return pb.GetRunResponse(run=pb.Run(step=self.steps.get(request.run_id, 0)))
        if self.refusal is not None:
            raise self.refusal
        if request.attachment != self.attachments[request.run_id]:
            raise errors.ClientSuperseded("another client has attached")
        place = request.run_id, request.seq_id
        if place not in self.replies:
            if request.seq_id != taken + 1:
                raise errors.SeqIdReused("was used with another payload")
            self.taken[request.run_id] += 1
            is_step = isinstance(request, pb.OptimStepRequest)
            if is_step and not request.adamw.learning_rate:
                raise errors.OutOfRange("must be positive")
            self.replies[place] = request, pb.OptimStepResponse(step=taken + 1) if is_step else reply()
        sent, reply = self.replies[place]
        if _content(sent) != _content(request):
            raise errors.SeqIdReused("was used with another payload")
        if self.lost_replies:
            self.lost_replies -= 1
            raise errors.EngineUnavailable("the engine died")
        await asyncio.sleep(0)
        await self.answers.wait()
        if isinstance(reply, pb.OptimStepResponse):
            self.steps[request.run_id] = max(reply.step, self.steps.get(request.run_id, 0))
        return reply


@pytest.fixture
def trainer():
    return Trainer()


@pytest.fixture
def gateways(trainer, tmp_path):
    """Start gateways, one after the other, on the same state."""
    made = []

    def start():
        while made:
            made.pop().store.close()
        made.append(MetaClawApi(trainer, None, tmp_path))
        return made[0]

    yield start
    while made:
        made.pop().store.close()


@pytest.fixture
def api(gateways):
    return gateways()


def take(api, rate=1.0):
    """Take a step through a gateway."""
    return api.sessions.send("tenant", RUN, [make(rate)], only)


def make(rate):
    return lambda **place: pb.OptimStepRequest(adamw=pb.AdamwParams(learning_rate=rate), **place)


def only(session, reply):
    return reply


@pytest.fixture
def step(api):
    return lambda run_id, rate=1.0: api.sessions.send("tenant", run_id, [make(rate)], only)


async def test_the_first_requests_attach_once(trainer, step):
    replies = await asyncio.gather(*(step(RUN) for _ in range(5)))
    assert [reply.step for reply in replies] == [1, 2, 3, 4, 5]
    assert trainer.attachments == {RUN: 1}


async def test_a_refused_request_does_not_fail_those_behind_it(step):
    replies = await asyncio.gather(step(RUN, 0.0), step(RUN), step(RUN), return_exceptions=True)
    assert isinstance(replies[0], errors.OutOfRange)
    assert [reply.step for reply in replies[1:]] == [2, 3]


async def test_a_request_that_is_sent_again_because_its_answer_was_lost_is_the_same_command(trainer, step):
    trainer.lost_replies = 2
    for _ in range(2):
        with pytest.raises(errors.EngineUnavailable):
            await step(RUN)
    assert (await step(RUN)).step == 1
    assert (await step(RUN)).step == 2


async def test_a_request_whose_caller_left_is_the_same_command_when_it_comes_again(trainer, step):
    calling = asyncio.create_task(step(RUN))
    while not trainer.replies:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert [(await step(RUN)).step for _ in range(2)] == [1, 2]


async def test_a_request_without_an_answer_is_the_same_command_at_the_next_gateway(trainer, gateways):
    trainer.lost_replies = 1
    with pytest.raises(errors.EngineUnavailable):
        await take(gateways())
    api = gateways()
    assert [(await take(api)).step for _ in range(2)] == [1, 2]
    api = gateways()  # the last request has its answer, so an equal one is a new command
    assert [(await take(api, rate)).step for rate in (1.0, 0.5)] == [3, 4]


async def test_a_request_that_never_arrived_is_sent_by_the_next_gateway(trainer, gateways):
    trainer.is_away = False
    await take(gateways())
    trainer.is_away = True
    api = gateways()
    with pytest.raises(errors.UpstreamUnavailable):
        await take(api)
    trainer.is_away = False
    assert (await take(gateways())).step == 2


async def test_another_request_after_a_restart_is_a_new_command(trainer, gateways):
    trainer.lost_replies = 1
    with pytest.raises(errors.EngineUnavailable):
        await take(gateways())
    assert [(await take(gateways(), rate)).step for rate in (0.5, 1.0)] == [2, 3]


@turned_away
async def test_a_refusal_between_a_lost_answer_and_the_request_that_is_sent_again_forgets_nothing(
    trainer, step, refusal
):
    trainer.lost_replies = 1
    with pytest.raises(errors.EngineUnavailable):
        await step(RUN)
    trainer.refusal = refusal
    with pytest.raises(type(refusal)):
        await step(RUN)
    trainer.refusal = None
    assert [(await step(RUN)).step for _ in range(2)] == [1, 2]


@turned_away
async def test_another_request_that_is_refused_does_not_make_a_lost_command_execute_twice(trainer, step, refusal):
    trainer.lost_replies = 1
    with pytest.raises(errors.EngineUnavailable):
        await step(RUN)
    trainer.refusal = refusal
    with pytest.raises(type(refusal)):
        await step(RUN, 0.5)
    trainer.refusal = None
    assert [(await step(RUN, rate)).step for rate in (1.0, 0.5)] == [1, 2]


async def test_a_request_that_was_refused_before_it_arrived_is_not_sent_for_another(trainer, step):
    trainer.refusal = FULL
    with pytest.raises(errors.Overloaded):
        await step(RUN)
    trainer.refusal = None
    assert (await step(RUN, 0.5)).step == 1
    assert [request.adamw.learning_rate for request, _ in trainer.replies.values()] == [0.5]


async def test_of_a_request_with_two_commands_only_the_one_without_an_answer_is_sent_again(trainer, api, step):
    commands = [make(rate) for rate in (0.1, 0.2)]
    await step(RUN)

    def send():
        return api.sessions.send("tenant", RUN, commands, lambda session, *replies: [reply.step for reply in replies])

    sending = asyncio.create_task(send())
    while trainer.taken[RUN] < 3:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert [await send(), await send()] == [[2, 3], [4, 5]]


async def post(api, path, body, leave):
    """Post a request; its caller leaves when `leave` is set."""
    app, status = FastAPI(), []
    app.include_router(api.routes())
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b"", "headers": []}
    scope["headers"] = [(b"content-type", b"application/json")]
    scope["state"] = {"identity": Identity("tenant")}

    async def receive():
        if (message := next(messages, None)) is None:
            await leave.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message):
        status.append(message.get("status"))

    await app(scope, receive, send)
    return status[0]


@pytest.mark.parametrize("path", ["/v1/train/optim_step", "/v1/weights/save"])
async def test_a_request_whose_connection_breaks_executes_once_when_it_is_sent_again(trainer, api, path):
    trainer.answers.clear()
    leave, body = asyncio.Event(), {"session_id": RUN}
    posting = asyncio.create_task(post(api, path, body, leave))
    while not trainer.taken.get(RUN):  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    leave.set()
    await asyncio.gather(posting, return_exceptions=True)
    trainer.answers.set()
    assert await post(api, path, body, asyncio.Event()) == 200
    assert trainer.taken[RUN] == (2 if path.endswith("save") else 1)


def saved_names(trainer):
    requests = (request for request, _ in trainer.replies.values())
    return [request.name for request in requests if isinstance(request, pb.SaveCheckpointRequest)]


async def test_weights_without_a_name_have_that_of_their_step(trainer, api):
    paths, stays = ("/v1/train/optim_step", "/v1/weights/save"), asyncio.Event()
    await asyncio.gather(*(post(api, path, {"session_id": RUN}, stays) for path in paths))
    assert saved_names(trainer) == ["adapter_step_0001"]


async def test_weights_without_a_name_have_that_of_their_step_also_if_its_caller_had_left(trainer, api):
    trainer.answers.clear()
    leaves, stays = asyncio.Event(), asyncio.Event()
    stepping = asyncio.create_task(post(api, "/v1/train/optim_step", {"session_id": RUN}, leaves))
    while not trainer.taken.get(RUN):  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    leaves.set()
    await asyncio.gather(stepping, return_exceptions=True)
    trainer.answers.set()
    assert await post(api, "/v1/weights/save", {"session_id": RUN}, stays) == 200
    assert saved_names(trainer) == ["adapter_step_0001"]


async def test_weights_without_a_name_have_that_of_their_step_also_if_the_gateway_restarted_within_it(
    trainer, api, gateways
):
    trainer.answers.clear()
    stays, body = asyncio.Event(), {"session_id": RUN}
    stepping = asyncio.create_task(post(api, "/v1/train/optim_step", body, stays))
    while not trainer.taken.get(RUN):  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    saving = asyncio.create_task(post(gateways(), "/v1/weights/save", body, stays))
    while trainer.taken[RUN] < 2:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    trainer.answers.set()
    assert await asyncio.gather(stepping, saving) == [200, 200]
    assert saved_names(trainer) == ["adapter_step_0001"]


async def test_another_request_goes_on_after_a_command_whose_answer_was_lost(trainer, step):
    trainer.lost_replies = 1
    with pytest.raises(errors.EngineUnavailable):
        await step(RUN)
    assert (await step(RUN, 0.5)).step == 2
    assert (await step(RUN)).step == 3


async def test_sessions_beyond_the_most_are_forgotten_unless_they_are_in_use(monkeypatch, trainer, step):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    one, two, three, *others = (new_run_id() for _ in range(6))
    for run_id in (one, two, three, one):
        await step(run_id)
    assert trainer.attachments == {one: 2, two: 1, three: 1}
    together = await asyncio.gather(*(step(run_id) for run_id in others * 2))
    assert sorted(reply.step for reply in together) == [1, 1, 1, 2, 2, 2]


async def test_sessions_that_were_never_attached_take_the_place_of_none(monkeypatch, trainer, step):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    trainer.lost_replies = 1
    with pytest.raises(errors.EngineUnavailable):
        await step(RUN)
    trainer.is_away = True
    for _ in range(3):
        with pytest.raises(errors.UpstreamUnavailable):
            await step(new_run_id())
    trainer.is_away = False
    for _ in range(3):
        await step(new_run_id())
    assert [(await step(RUN)).step for _ in range(2)] == [1, 2]


async def test_an_unknown_run_is_no_session(step):
    for run_id in (UNKNOWN, UNKNOWN, "run", "\ud800"):
        with pytest.raises(errors.RunNotFound, match="lora/create"):
            await step(run_id)


def test_a_batch_of_64_samples_of_4096_tokens_is_taken_whole():
    numbers = [round(-1 / number, 6) for number in range(1, 4097)]
    tokens = list(range(100_000, 104_096))
    datum = {"model_input_tokens": tokens, "target_tokens": tokens, "logprobs": numbers, "advantages": numbers}
    content = json.dumps({"session_id": RUN, "datums": [datum] * 64}).encode()
    JsonParts(most_parts(BATCHES)).add(content)
    batch = TrainerBatch.read(content)
    assert len(batch.data) == 64
    assert batch.tokens == 64 * 4096


@pytest.mark.parametrize(
    ("datums", "refusal", "field"),
    [
        (["x"] * 100, errors.InvalidArgument, "datums[0]"),
        ([{}] * 16_385, errors.OutOfRange, "datums"),
    ],
)
def test_a_batch_is_refused_at_its_first_wrong_datum(datums, refusal, field):
    with pytest.raises(refusal) as refused:
        TrainerBatch.read(json.dumps({"session_id": RUN, "datums": datums}).encode())
    assert refused.value.field == field
