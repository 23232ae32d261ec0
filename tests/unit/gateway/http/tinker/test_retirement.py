"""Runs of sessions that are over are deleted, and what of them is not saved is saved first."""

from __future__ import annotations

import asyncio

import pytest
from support.patience import PATIENCE

from gateway.http.tinker.retirement import Retirement
from gateway.http.tinker.store import Model, Session, Store
from paceline import errors
from paceline.trainer.v1 import trainer_service_pb2 as pb

RUN = "run-" + "0" * 32


class Trainer:
    """A trainer with one run, which has taken `step` steps and has a state checkpoint of `saved` steps."""

    def __init__(self, step=0, saved=0, failure=None):
        self.run = pb.Run(run_id=RUN, base_model="base", last_seq_id=5 if step else 0, step=step, state=1)
        self.run.lora.rank = 4
        self.checkpoints, self.failure, self.sent = [], failure, []
        self.is_deleted = asyncio.Event()
        if saved:
            self._save("mine", saved)

    async def call(self, tenant, request, reply, **_):
        self.sent.append(type(request).__name__.removesuffix("Request"))
        if reply is pb.AttachRunResponse:
            assert request.outstanding == pb.OUTSTANDING_POLICY_WAIT
            return reply(run=self.run, attachment=1)
        if reply is pb.ListCheckpointsResponse:
            return reply(checkpoints=self.checkpoints)
        assert reply is pb.DeleteRunResponse
        self.is_deleted.set()
        return reply()

    async def execute(self, tenant, command, **_):
        if self.failure is not None:
            raise self.failure
        assert (command.seq_id, command.ttl_seconds) == (self.run.last_seq_id + 1, 7 * 86_400)
        return pb.SaveCheckpointResponse(checkpoint=self._save(command.name, self.run.step))

    def _save(self, name, step):
        kind = pb.CHECKPOINT_KIND_STATE
        made = pb.Checkpoint(path=f"paceline://{RUN}/state/{name}", run_id=RUN, kind=kind, name=name, step=step)
        self.checkpoints.insert(0, made)
        self.run.latest_state_checkpoint = made.path
        return made


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "tinker.sqlite")
    yield store
    store.close()


async def add_model(store, *, is_over=True, reloaded=False):
    await store.add_session(Session("s", "tenant", 0.0, 0.0, 1.0 if is_over else None))
    await store.add_model(Model("m", "tenant", "s", RUN, "base", 1, 0.0, 0.0, {}, {}, reloaded=reloaded))


@pytest.mark.parametrize(
    ("step", "saved", "reloaded", "names"),
    [
        (0, 0, False, []),
        (3, 3, False, ["mine"]),
        (3, 0, False, ["session-end-6"]),
        (3, 2, False, ["session-end-6", "mine"]),
        (3, 3, True, ["session-end-6", "mine"]),  # step 3 may have been taken again, from another checkpoint
    ],
)
async def test_steps_that_no_checkpoint_has_are_saved_before_the_run_is_deleted(store, step, saved, reloaded, names):
    trainer = Trainer(step, saved)
    await add_model(store, reloaded=reloaded)
    assert await Retirement(trainer, store).delete_oldest("tenant")
    assert [checkpoint.name for checkpoint in trainer.checkpoints] == names
    assert trainer.sent[-1] == "DeleteRun"
    assert store.model("m").ended is not None
    assert not await Retirement(trainer, store).delete_oldest("tenant")


async def test_a_run_that_cannot_be_saved_is_kept_and_tried_again(store):
    trainer = Trainer(3, failure=errors.DiskFull("full"))
    await add_model(store)
    retirement = Retirement(trainer, store)
    assert not await retirement.delete_oldest("tenant")
    assert "DeleteRun" not in trainer.sent
    trainer.failure = None
    assert await retirement.delete_oldest("tenant")


async def test_a_run_of_an_open_session_is_left_alone(store):
    trainer = Trainer(3)
    await add_model(store, is_over=False)
    assert not await Retirement(trainer, store).delete_oldest("tenant")
    assert trainer.sent == []


async def test_runs_of_sessions_that_are_over_go_without_anybodys_help(store):
    trainer = Trainer(3)
    await add_model(store)
    retirement = Retirement(trainer, store)
    retirement.wake()
    await asyncio.wait_for(trainer.is_deleted.wait(), PATIENCE)
    assert [checkpoint.name for checkpoint in trainer.checkpoints] == ["session-end-6"]
    await retirement.delete_oldest("tenant")  # waits for what is in progress
    assert store.model("m").ended is not None
    await retirement.close()
