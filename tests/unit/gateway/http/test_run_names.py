"""Names of runs are known without asking the trainer each time, and mean the newest run all the same."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gateway.http import run_names as run_names_module
from gateway.http.run_names import RunNames
from gateway.proxy import Router
from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb


class Trainer:
    """A trainer and the gateway's way to it."""

    def __init__(self):
        self.runs, self.lists, self.failure = [], 0, None
        self.router = Router(SimpleNamespace(ready=True), (), 0)

    async def call(self, tenant, request, reply, **_):
        self.lists += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        mine = [run for owner, run in reversed(self.runs) if owner == tenant]
        return reply(runs=mine)

    def make(self, tenant, name, *, version=1):
        """Create and publish a run through the gateway; return its id."""
        run_id, metadata = f"run-{len(self.runs):032x}", {"name": name} if name else {}
        with self.router.counted("/paceline.trainer.v1.TrainerService/CreateRun", tenant):
            run = pb.Run(run_id=run_id, latest_version=version, user_metadata=metadata, state=pb.RUN_STATE_READY)
            run.lora.rank = 1
            self.runs.append((tenant, run))
        return run_id

    def delete(self, tenant, run_id):
        with self.router.counted("/paceline.trainer.v1.TrainerService/DeleteRun", tenant):
            self.runs = [(owner, run) for owner, run in self.runs if run.run_id != run_id]

    def leave(self):
        self.router.trainer.ready = False
        self.failure = errors.UpstreamUnavailable("away")


@pytest.fixture
def trainer():
    return Trainer()


@pytest.fixture
def names(trainer):
    return RunNames(trainer)


async def test_a_name_is_looked_up_once_and_holds_while_the_trainer_is_away(trainer, names):
    run_id = trainer.make("team", "policy")
    for _ in range(3):
        assert (await names.find("team", "policy")).run_id == run_id
    assert trainer.lists == 1
    trainer.leave()
    trainer.make("team", "policy")  # by another gateway, which still reaches it
    assert (await names.find("team", "policy")).run_id == run_id
    for tenant, name in (("team", "unknown"), ("other", "policy")):
        with pytest.raises(errors.UpstreamUnavailable):
            await names.find(tenant, name)


async def test_a_name_moves_to_a_newer_run_at_once_and_goes_with_its_last_run(trainer, names):
    first = trainer.make("team", "policy")
    assert (await names.find("team", "policy")).run_id == first
    second = trainer.make("team", "policy")
    assert (await names.find("team", "policy")).run_id == second
    third = trainer.make("team", "policy", version=0)  # not before it has published
    assert (await names.find("team", "policy")).run_id == second
    for run_id in (first, second):
        trainer.delete("team", run_id)
    assert (await names.find("team", "policy")).run_id == third
    trainer.delete("team", third)
    assert await names.find("team", "policy") is None


async def test_what_another_gateway_changed_is_found_soon(trainer, names, monkeypatch):
    trainer.make("team", "policy")
    await names.find("team", "policy")
    newer = trainer.make("team", "policy")
    trainer.router.run_changes.clear()
    names._known["team"] = run_names_module.KnownRuns(**{**_fields(names._known["team"]), "changes": 0})
    monkeypatch.setattr(run_names_module, "OLD_SECONDS", 0.0)
    assert (await names.find("team", "policy")).run_id == newer


def _fields(known):
    return {name: getattr(known, name) for name in known.__slots__}


async def test_a_trainer_that_fails_while_it_counts_as_reachable_costs_no_known_name(trainer, names):
    run_id = trainer.make("team", "policy")
    await names.find("team", "policy")
    trainer.make("team", "another")
    trainer.failure = errors.TimedOut("late")
    assert (await names.find("team", "policy")).run_id == run_id


async def test_so_many_tenants_are_known(trainer, names, monkeypatch):
    monkeypatch.setattr(run_names_module, "MOST_TENANTS", 2)
    for tenant in ("one", "two", "three"):
        trainer.make(tenant, "policy")
        await names.find(tenant, "policy")
    assert [bool(names.known(tenant)) for tenant in ("one", "two", "three")] == [False, True, True]
