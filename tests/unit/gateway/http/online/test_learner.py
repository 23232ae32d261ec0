"""A learner sends a command until it has the command's answer."""

from __future__ import annotations

from types import SimpleNamespace

from gateway.http.online import learner as learner_module
from gateway.http.online.learner import Learner
from gateway.http.online.store import Command
from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb

KEPT = errors.Internal("the publish failed", metadata={"error_id": "kept"})
STEP = Command(5, "optim_step", 4, pb.OptimStepRequest(run_id="run", seq_id=5).SerializeToString())


class Services:
    """Gives one answer after another; the last one again and again."""

    def __init__(self, *answers):
        self._answers = list(answers)

    async def call(self, tenant, request, reply, *, seconds):
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, errors.PacelineError):
            raise answer
        return answer


async def answer_to(monkeypatch, *answers):
    monkeypatch.setattr(learner_module, "_FIRST_PAUSE", 0.0)
    learner = Learner(Services(*answers), None, SimpleNamespace(tenant="team"), 1 << 20)
    return await learner._until_answered(STEP)


async def test_a_failure_that_nobody_foresaw_is_an_answer_once_it_is_given_again(monkeypatch):
    assert await answer_to(monkeypatch, errors.EngineUnavailable("restarting"), KEPT) is KEPT


async def test_failures_on_the_way_are_not_answers(monkeypatch):
    done = pb.OptimStepResponse(step=1)
    assert await answer_to(monkeypatch, errors.Internal.unforeseen(), errors.Internal.unforeseen(), done) is done
