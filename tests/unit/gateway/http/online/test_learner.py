"""A learner sends a command until it has the command's answer."""

from __future__ import annotations

from types import SimpleNamespace

from gateway.http.online import learner as learner_module
from gateway.http.online.learner import Learner
from gateway.http.online.store import StoredCommand
from paceline import errors
from paceline.errors import Fate
from paceline.trainer.v1 import trainer_service_pb2 as pb

STEP = StoredCommand(5, "optim_step", 4, pb.OptimStepRequest(run_id="run", seq_id=5).SerializeToString())


class Services:
    """Gives one answer after another; the last one again and again."""

    def __init__(self, *answers):
        self._answers = list(answers)

    async def execute(self, tenant, command, *, seconds):
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, errors.PacelineError):
            raise answer
        return answer


async def answer_to(monkeypatch, *answers):
    monkeypatch.setattr(learner_module, "FIRST_PAUSE", 0.0)
    learner = Learner(Services(*answers), None, SimpleNamespace(tenant="team"), 1 << 20)
    return await learner._until_answered(STEP)


def failed(error, fate):
    error.fate = fate
    return error


async def test_a_refusal_ends_the_command_whatever_its_error(monkeypatch):
    kept = failed(errors.Internal.unforeseen(), Fate.ANSWERED)
    assert await answer_to(monkeypatch, failed(errors.ShuttingDown("stops"), Fate.UNKNOWN), kept) is kept


async def test_failures_on_the_way_are_not_answers(monkeypatch):
    done = pb.OptimStepResponse(step=1)
    troubles = [
        failed(errors.Internal.unforeseen(), Fate.UNKNOWN),
        failed(errors.Overloaded("full"), Fate.TURNED_AWAY),
        failed(errors.InvalidApiKey("is not known"), Fate.TURNED_AWAY),
        failed(errors.RunNotFound("of a call that follows"), Fate.UNKNOWN),
    ]
    assert await answer_to(monkeypatch, *troubles, done) is done


async def test_a_command_that_is_turned_away_for_good_ends(monkeypatch):
    lost = failed(errors.RunStateLost("load"), Fate.TURNED_AWAY)
    assert await answer_to(monkeypatch, lost) is lost
