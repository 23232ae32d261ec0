"""What is remembered of models and checkpoints that are gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from support.patience import PATIENCE

from gateway.http.tinker import tidying as tidying_module
from gateway.http.tinker.store import Model, Store, save_of
from gateway.http.tinker.tidying import Tidying
from paceline.types import Checkpoint, CheckpointKind


def run_id(number):
    return f"run-{number:032x}"


def checkpoint(number, name="a"):
    made, path = datetime.fromtimestamp(number, UTC), f"paceline://{run_id(number)}/state/{name}"
    return Checkpoint(path, run_id(number), CheckpointKind.STATE, name, 1, 1, "", "", made)


class Trainer:
    """A trainer's lists, as the gateway reads them."""

    def __init__(self):
        self.numbers, self.saved, self.lists = list[int](), list[Checkpoint](), 0

    async def runs(self, tenant):
        self.lists += 1
        return [SimpleNamespace(run_id=run_id(number)) for number in self.numbers]

    async def checkpoints(self, tenant):
        return self.saved


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "tinker.sqlite")
    yield store
    store.close()


async def add_model(store, number, tenant="tenant"):
    model_id = f"session:train:{number}"
    return await store.add_model(Model(model_id, tenant, "session", run_id(number), "base", 1, 0.0, 0.0, {}, {}))


async def test_models_are_known_as_long_as_their_runs_or_checkpoints_and_of_others_the_newest(store, monkeypatch):
    monkeypatch.setattr(tidying_module, "MOST_GONE_MODELS", 2)
    trainer = Trainer()
    for number in range(7):
        await add_model(store, number)
    await add_model(store, 7, "stranger")
    trainer.numbers, trainer.saved = [0], [checkpoint(2)]
    await Tidying(trainer, store).tidy("tenant")
    assert {model.run_id for model in store.models("tenant")} == {run_id(number) for number in (0, 2, 5, 6)}
    assert len(store.models("stranger")) == 1


async def test_what_was_attached_to_a_checkpoint_goes_with_it(store):
    trainer = Trainer()
    kept, gone = checkpoint(1), checkpoint(1, "gone")
    for each in (kept, gone):
        await store.keep_checkpoint_metadata(each, "tenant", {"a": "b"})
    trainer.saved = [kept, checkpoint(2)]
    await Tidying(trainer, store).tidy("tenant")
    assert store.checkpoint_metadata("tenant") == {save_of(kept): {"a": "b"}}


async def test_rows_that_grow_are_looked_at_now_and_then_and_rows_that_are_replaced_are_not(store, monkeypatch):
    monkeypatch.setattr(tidying_module, "EVERY", 3)
    monkeypatch.setattr(tidying_module, "MOST_GONE_MODELS", 0)
    trainer = Trainer()
    tidying = Tidying(trainer, store)
    for number in range(3):
        tidying.added("tenant", await add_model(store, number))
    async with asyncio.timeout(PATIENCE):
        while store.models("tenant"):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    assert trainer.lists == 1
    trainer.saved = [checkpoint(number) for number in range(3)]
    for each in (*trainer.saved, replace(trainer.saved[0], create_time=datetime.fromtimestamp(9, UTC))):
        tidying.added("tenant", await store.keep_checkpoint_metadata(each, "tenant", {"a": "b"}))
    await tidying.tidy("tenant")  # after those that have begun
    assert trainer.lists == 2 + 1
    await tidying.close()
