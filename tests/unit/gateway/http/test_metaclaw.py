"""Requests of one MetaClaw session that arrive at the same time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http import metaclaw
from gateway.http.metaclaw import MetaClawApi
from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb


class Trainer:
    """Numbers attachments and commands as the trainer does, and refuses a learning rate of 0."""

    def __init__(self):
        self.attachments = {}
        self.taken = {}
        self.replies = {}
        self.lost_replies = 0
        """How many of the next replies are lost."""

    async def call(self, tenant, request, reply, **_):
        await asyncio.sleep(0)
        if request.run_id == "unknown":
            raise errors.RunNotFound("no such run")
        taken = self.taken.setdefault(request.run_id, 0)
        if isinstance(request, pb.AttachRunRequest):
            self.attachments[request.run_id] = self.attachments.get(request.run_id, 0) + 1
            run = {"last_seq_id": taken, "step": taken}
            return pb.AttachRunResponse(attachment=self.attachments[request.run_id], run=run)
        if request.attachment != self.attachments[request.run_id]:
            raise errors.ClientSuperseded("another client has attached")
        place = request.run_id, request.seq_id
        if place not in self.replies:
            if request.seq_id != taken + 1:
                raise errors.SeqIdReused("was used with another payload")
            self.taken[request.run_id] += 1
            if not request.adamw.learning_rate:
                raise errors.OutOfRange("must be positive")
            self.replies[place] = request, pb.OptimStepResponse(step=taken + 1)
        sent, reply = self.replies[place]
        if sent != request:
            raise errors.SeqIdReused("was used with another payload")
        if self.lost_replies:
            self.lost_replies -= 1
            raise errors.EngineUnavailable("the engine died")
        await asyncio.sleep(0)
        return reply


@pytest.fixture
def trainer():
    return Trainer()


@pytest.fixture
def step(trainer):
    api = MetaClawApi(trainer, None)

    def make(rate):
        return lambda **place: pb.OptimStepRequest(adamw=pb.AdamwParams(learning_rate=rate), **place)

    return lambda run_id, rate=1.0: api._send("tenant", run_id, make(rate), pb.OptimStepResponse)


async def test_the_first_requests_attach_once(trainer, step):
    replies = await asyncio.gather(*(step("run") for _ in range(5)))
    assert [reply.step for reply in replies] == [1, 2, 3, 4, 5]
    assert trainer.attachments == {"run": 1}


async def test_a_refused_request_does_not_fail_those_behind_it(step):
    replies = await asyncio.gather(step("run", 0.0), step("run"), step("run"), return_exceptions=True)
    assert isinstance(replies[0], errors.OutOfRange)
    assert [reply.step for reply in replies[1:]] == [2, 3]


async def test_a_request_that_is_sent_again_because_its_answer_was_lost_is_the_same_command(trainer, step):
    trainer.lost_replies = 2
    for _ in range(2):
        with pytest.raises(errors.EngineUnavailable):
            await step("run")
    assert (await step("run")).step == 1
    assert (await step("run")).step == 2


async def test_a_request_whose_caller_left_is_the_same_command_when_it_comes_again(trainer, step):
    calling = asyncio.create_task(step("run"))
    while not trainer.replies:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert [(await step("run")).step for _ in range(2)] == [1, 2]


async def test_another_request_goes_on_after_a_command_whose_answer_was_lost(trainer, step):
    trainer.lost_replies = 1
    with pytest.raises(errors.EngineUnavailable):
        await step("run")
    assert (await step("run", 0.5)).step == 2
    assert (await step("run")).step == 3


async def test_sessions_beyond_the_most_are_forgotten_unless_they_are_in_use(monkeypatch, trainer, step):
    monkeypatch.setattr(metaclaw, "_MAX_SESSIONS", 2)
    for run_id in ("one", "two", "three", "one"):
        await step(run_id)
    assert trainer.attachments == {"one": 2, "two": 1, "three": 1}
    together = await asyncio.gather(*(step(run_id) for run_id in ("four", "five", "six", "four", "five", "six")))
    assert sorted(reply.step for reply in together) == [1, 1, 1, 2, 2, 2]


async def test_an_unknown_run_is_no_session(step):
    for _ in range(2):
        with pytest.raises(errors.RunNotFound, match="lora/create"):
            await step("unknown")
