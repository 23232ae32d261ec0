"""Each command of a client ends with its answer, or an error that is true, whatever happens on its way."""

from __future__ import annotations

from collections import Counter

import pytest
from support.faults.fault_run import FaultRun, trainer_for_plans
from support.faults.faulty_network import Fault

from paceline import errors

pytestmark = pytest.mark.services

SEEDS = range(30)


@pytest.fixture
def trainer(tmp_path):
    with trainer_for_plans(tmp_path) as trainer:
        yield trainer


async def test_commands_execute_once_in_order_and_what_the_client_says_of_them_is_true(trainer):
    outcomes = await FaultRun(trainer).run_all(SEEDS)
    broken = {outcome.plan.seed: outcome.differences for outcome in outcomes if outcome.differences}
    assert not broken, "python -m bench.durability.client_faults 1 --first SEED prints a plan's commands"
    struck = sum((outcome.struck for outcome in outcomes), Counter())
    assert {fault.name for fault in Fault} <= struck.keys(), "every fault is met"
    assert {"cut up", "cut down"} <= struck.keys()
    fates = sum((outcome.fates for outcome in outcomes), Counter())
    assert min(fates[fate] for fate in errors.Fate) >= 20, "every fate is told"
