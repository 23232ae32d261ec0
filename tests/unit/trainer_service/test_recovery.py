"""In which order runs are restored."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from support.patience import PATIENCE

from paceline import errors
from paceline.background import Background
from trainer_service.limits.gates import ByteGate
from trainer_service.recovery import Recovery


class Registry(list):
    engines_lost = 0


class Recovering(Recovery):
    """Restores a run once it is let, and records in which order runs began."""

    def __init__(self, runs):
        self.background = Background("recovery")
        # What restoring a run needs is None: `recover` is replaced.
        none = {"metrics": None, "recorder": None, "usage": None}
        super().__init__(*[None] * 5, ByteGate(0), None, self.background.spawn, None, Registry(runs), **none)
        self.registry = self._registry
        self.began, self.failures = [], []
        self.may_end = {run.run_id: asyncio.Event() for run in runs}
        self.has_begun = {run.run_id: asyncio.Event() for run in runs}

    def _check_base(self, run):
        pass

    async def recover(self, run):
        self.began.append(run.run_id)
        self.has_begun[run.run_id].set()
        await self.may_end[run.run_id].wait()
        if self.failures:
            raise self.failures.pop()
        run.is_restored = True

    async def begun(self, run_id):
        await asyncio.wait_for(self.has_begun[run_id].wait(), PATIENCE)


def run(number, unanswered=0):
    return SimpleNamespace(
        run_id=f"run-{number}",
        recovering=asyncio.Lock(),
        is_restored=False,
        sequencer=SimpleNamespace(is_closed=False, executed=5, last_seq_id=5 + unanswered, is_awaited=False),
        create_time=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
    )


@pytest.fixture
async def recovery():
    recovery = Recovering([run(1), run(2), run(3, unanswered=1), run(4), run(5)])
    yield recovery
    await recovery.background.close()


async def test_a_run_that_somebody_waits_for_goes_first_and_the_others_one_after_another(recovery):
    recovery.background.spawn(recovery.recover_all())
    await recovery.begun("run-3")  # it has a command to execute
    recovery.ask(recovery.registry[0])
    recovery.ask(recovery.registry[1])
    await recovery.begun("run-2")
    assert recovery.began == ["run-3", "run-1", "run-2"]
    for event in recovery.may_end.values():
        event.set()
    await asyncio.wait_for(recovery.background.finish(), PATIENCE)
    assert recovery.began == ["run-3", "run-1", "run-2", "run-5", "run-4"]


async def test_runs_that_nobody_waits_for_give_way_to_one_that_somebody_waits_for(recovery):
    for event in recovery.may_end.values():
        event.set()
    recovery.may_end["run-1"].clear()
    recovery.ask(recovery.registry[0])
    await recovery.begun("run-1")
    recovery.background.spawn(recovery.recover_all())
    for _ in range(20):  # as long as it takes to begin
        await asyncio.sleep(0)
    assert recovery.began == ["run-1"]
    recovery.may_end["run-1"].set()
    await recovery.begun("run-4")


async def test_a_run_that_fails_holds_up_no_other_and_is_tried_again(recovery):
    recovery.failures = [errors.DiskFull("full")]
    for event in recovery.may_end.values():
        event.set()
    recovery.background.spawn(recovery.recover_all())
    await recovery.begun("run-1")
    await asyncio.wait_for(recovery.background.finish(), PATIENCE)
    assert recovery.began == ["run-3", "run-5", "run-4", "run-2", "run-1", "run-3"]


async def test_a_run_that_was_asked_for_while_no_engine_ran_goes_first_into_the_next(recovery):
    recovery.failures = [errors.EngineUnavailable("restarting")]
    recovery.may_end["run-1"].set()
    recovery.ask(recovery.registry[0])
    await asyncio.wait_for(recovery.background.finish(), PATIENCE)
    recovery.registry.engines_lost += 1
    recovery.background.spawn(recovery.recover_all())
    await recovery.begun("run-3")
    assert recovery.began == ["run-1", "run-1", "run-3"]


async def test_a_run_whose_commands_are_followed_goes_first(recovery):
    recovery.registry[0].sequencer.is_awaited = True
    recovery.background.spawn(recovery.recover_all())
    await recovery.begun("run-1")
    assert recovery.began == ["run-1"]
