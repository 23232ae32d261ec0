"""A trainer or its engine is killed at a named moment of a step or a publish; docs/kills.md tells what follows."""

from __future__ import annotations

import grpc
import pytest
from support.patience import PATIENCE
from support.stacks.cluster import wait_for
from support.stacks.warm_trainer import DATUM, WarmRun

from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb

pytestmark = pytest.mark.services

ADAMW = pb.AdamwParams(learning_rate=1e-2)


@pytest.fixture
def trainer(fresh_trainer):
    return fresh_trainer


def script(run):
    """Return a pass, a step and a publish of a new run."""
    return [
        pb.ForwardBackwardRequest(run_id=run.run_id, seq_id=1, data=[DATUM], loss_fn="cross_entropy"),
        pb.OptimStepRequest(run_id=run.run_id, seq_id=2, adamw=ADAMW),
        pb.PublishWeightsRequest(run_id=run.run_id, seq_id=3),
    ]


def method_of(request):
    return type(request).__name__.removesuffix("Request")


def content_of(reply):
    """Return what two executions of a command have in common: all but the run, and the times that they took."""
    if isinstance(reply, pb.PublishWeightsResponse):
        return reply.model.version, reply.model.blake3
    if isinstance(reply, pb.OptimStepResponse):
        return reply.step, reply.grad_norm, reply.tokens
    return reply.outputs


def undisturbed(trainer):
    """Return what the script answers, and a new run, whose weights are the same as those that it began with."""
    assert trainer.start()
    with trainer.connect() as stub:
        other, run = WarmRun(stub, "undisturbed"), WarmRun(stub)
        expected = [content_of(other.call(method_of(request), request)) for request in script(other)]
        other.delete()  # so that the next start has nothing to replay
    trainer.kill()
    return expected, run


@pytest.mark.parametrize(
    ("point", "command", "is_durable"),
    [
        ("before_append:3", 2, False),
        ("after_sync:2", 2, True),
        ("after_execute:2", 2, True),
        ("after_capture:3", 3, True),
    ],
    ids=["before it is durable", "before it executes", "before its answer is durable", "while a version is written"],
)
def test_a_command_executes_once_whenever_the_trainer_is_killed(trainer, point, command, is_durable):
    expected, run = undisturbed(trainer)
    assert trainer.start(failpoints=point)
    answers, killed_in = [], []
    with trainer.connect() as stub:
        run.stub = stub
        for request in script(run):
            try:
                reply = getattr(stub, method_of(request))(request, timeout=PATIENCE, wait_for_ready=True)
            except grpc.RpcError:
                killed_in.append(request.seq_id)
                assert trainer.service.wait(PATIENCE)
                assert trainer.start()
                assert (run.get().last_seq_id == request.seq_id) == is_durable
                reply = run.call(method_of(request), request)
            answers.append(content_of(reply))
    assert killed_in == [command]
    assert answers == expected


@pytest.mark.parametrize("moment", ["in the middle of a pass", "in the middle of a step"])
def test_a_caller_waits_and_is_answered_as_ever_when_the_engine_is_killed(trainer, moment):
    expected, run = undisturbed(trainer)
    point = f"engine_pass_{run.run_id}" if moment == "in the middle of a pass" else "engine_OptimStep"
    assert trainer.start(failpoints=f"{point}:1")
    with trainer.connect() as stub:
        requests = script(run)
        replies = [getattr(stub, method_of(one))(one, timeout=PATIENCE, wait_for_ready=True) for one in requests]
    assert trainer.text().count('"event": "engine died during a command"') == 1
    assert [content_of(reply) for reply in replies] == expected


def test_a_run_with_a_command_that_ends_the_trainer_each_time_is_found_and_taken_out_by_hand(trainer):
    assert trainer.start(failpoints="before_execute:4")
    with trainer.connect() as stub:
        run, other = WarmRun(stub), WarmRun(stub, "other")
        run.step()
        checkpoint = run.save("kept").path
        with pytest.raises(grpc.RpcError):
            stub.ForwardBackward(
                pb.ForwardBackwardRequest(run_id=run.run_id, seq_id=4, data=[DATUM], loss_fn="cross_entropy")
            )
        assert trainer.service.wait(PATIENCE)
        for _ in range(2):
            trainer.start(failpoints="before_execute:1")
            assert trainer.service.wait(PATIENCE)
        named = [line for line in trainer.text().splitlines() if "commands without an answer execute now" in line]
        assert len(named) == 2
        assert all(run.run_id in line and '"first": 4' in line for line in named)
        journal = trainer.volume / "runs" / run.run_id / "journal"
        journal.rename(journal.with_name("journal.aside"))
        assert trainer.start()
        assert other.step().step == 1
        wait_for(lambda: run.get().state == pb.RUN_STATE_LOST, PATIENCE, trainer.text)
        run.seq_id = run.get().last_seq_id
        with pytest.raises(errors.RunStateLost) as caught:
            run.forward_backward()
        assert caught.value.metadata["checkpoint"] == checkpoint
        run.load(checkpoint)
        assert run.step().step == 2
