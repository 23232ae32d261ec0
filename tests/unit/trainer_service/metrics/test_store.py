"""The writer of all runs' metrics, and the rows that the recorder makes of commands, on a volume of their own."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from paceline import errors, layout
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.weights.v1.weight_service_pb2 import Agreement
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.metrics.pages import next_rows
from trainer_service.metrics.recorder import Recorder, Turn
from trainer_service.metrics.rows import RowSource, StoredRow
from trainer_service.metrics.store import MetricsStore
from trainer_service.runs.command import Outcome

NOW = datetime(2026, 1, 2, tzinfo=UTC)
DROPPED = "paceline_trainer_metrics_rows_dropped_total"


class Metrics:
    """A store and a recorder on a volume, and runs on it."""

    def __init__(self, root, guard=NO_GUARD):
        self.volume, self.registry = layout.Volume(root), CollectorRegistry()
        self.store = MetricsStore(self.volume, guard, self.registry, 1 << 20, 1 << 20)
        self.recorder = Recorder(self.store)
        self.seq_id = 0

    def run(self):
        run_id = layout.new_run_id()
        self.volume.run(run_id).mkdir(parents=True)
        answers = SimpleNamespace(answers=[])
        return SimpleNamespace(run_id=run_id, tenant="team", is_deleted=False, sequencer=answers)

    def executed(self, run, answer, *, seq_id=None, begun=0.0, ended=0.01, step=0, version=0, **figures):
        self.seq_id = seq_id or self.seq_id + 1
        turn = Turn(self.seq_id, step, begun, ended)
        self.recorder.executed(run, Outcome(answer, version, figures=figures), turn)

    async def rows(self, run):
        await self.recorder.ready(run)
        return (await self.store.read(run, lambda logs: next_rows(logs.rows, 0))).rows


@pytest.fixture
async def metrics(tmp_path):
    made = Metrics(tmp_path)
    yield made
    await made.store.close()


def a_pass(loss=1.0, tokens=2.0, **more):
    values = {"loss:sum": loss, "tokens:sum": tokens, "nonfinite_gradient:sum": 0.0, **more}
    return pb.ForwardBackwardResponse(metrics=values, outputs=[{}, {}])


def a_step(number=1):
    return pb.OptimStepResponse(step=number, grad_norm=0.5, learning_rate=0.1, tokens=8, milliseconds=2.0)


async def test_sums_of_passes_add_up_and_means_are_weighted_by_their_tokens(metrics):
    run = metrics.run()
    metrics.executed(run, a_pass(1.0, 2.0, **{"entropy:mean": 1.0}), **{"time/wait": 4.0})
    metrics.executed(run, a_pass(3.0, 6.0, **{"entropy:mean": 5.0}), begun=0.01, ended=0.03, **{"time/wait": 1.0})
    metrics.executed(run, a_step(), **{"memory/peak": 7.0})
    (row,) = await metrics.rows(run)
    assert row.values == pytest.approx(
        {
            "loss:sum": 4.0,
            "loss:mean": 0.5,
            "tokens:sum": 8.0,
            "nonfinite_gradient:sum": 0.0,
            "entropy:mean": 4.0,
            "sequences": 4.0,
            "grad_norm": 0.5,
            "learning_rate": 0.1,
            "tokens": 8.0,
            "memory/peak": 7.0,
            "time/wait": 5.0,
            "time/forward_backward": 25.0,
            "time/optim_step": 2.0,
            "tokens_per_second": 8 / 0.027,
        }
    )


async def test_the_time_between_steps_ends_with_the_first_pass_of_the_next(metrics):
    run = metrics.run()
    metrics.executed(run, a_step(1), begun=0.0, ended=1.0)
    metrics.executed(run, a_pass(), begun=1.5, ended=2.0)
    metrics.executed(run, a_pass(), begun=2.5, ended=3.0)
    metrics.executed(run, a_step(2), begun=3.0, ended=3.5)
    first, second = await metrics.rows(run)
    assert "time/between" not in first.values
    assert second.values["time/between"] == pytest.approx(500)


@pytest.mark.parametrize(
    "drop",
    [
        lambda metrics, run: metrics.executed(run, pb.OptimStepResponse(step=3, tokens=2)),
        lambda metrics, run: metrics.executed(run, pb.LoadCheckpointResponse()),
        lambda metrics, run: metrics.recorder.dropped_gradient(run),
    ],
    ids=["discarded", "loaded", "refused for NaN"],
)
async def test_passes_whose_gradient_is_gone_are_in_no_row(metrics, drop):
    run = metrics.run()
    metrics.executed(run, a_pass(100.0))
    drop(metrics, run)
    metrics.executed(run, a_pass(1.0))
    metrics.executed(run, a_step())
    (row,) = await metrics.rows(run)
    assert row.values["loss:sum"] == 1.0


async def test_a_pass_without_a_gradient_is_in_no_row(metrics):
    run = metrics.run()
    metrics.executed(run, pb.ForwardBackwardResponse(metrics={"loss:sum": 9.0, "tokens:sum": 1.0}))
    metrics.executed(run, a_step())
    (row,) = await metrics.rows(run)
    assert "loss:sum" not in row.values


async def test_a_step_that_executes_again_makes_one_row_at_once_and_later(metrics, tmp_path):
    run = metrics.run()
    metrics.executed(run, a_step(), seq_id=2)
    metrics.executed(run, a_step(), seq_id=2)
    assert len(await metrics.rows(run)) == 1
    metrics.executed(run, a_step(), seq_id=2)
    assert len(await metrics.rows(run)) == 1
    again = Metrics(tmp_path)
    again.executed(run, a_step(), seq_id=2)
    assert len(await again.rows(run)) == 1
    await again.store.close()


async def test_a_version_is_active_at_its_first_acknowledgement_also_if_that_comes_before_its_publish_ends(metrics):
    run = metrics.run()
    published = pb.PublishWeightsResponse(stage_milliseconds=3.0)
    metrics.executed(run, published, step=4, version=1, begun=1.0)
    for at in (1.5, 1.7):
        metrics.recorder.acknowledged(run.run_id, 1, at)
    metrics.recorder.acknowledged(run.run_id, 2, 3.25)
    metrics.executed(run, errors.AckTimeout("late"), step=5, version=2, begun=3.0)
    agreement = Agreement(tokens=10, mean_difference=0.25)
    agreement.model.run_id, agreement.model.version = run.run_id, 2
    metrics.recorder.compared(agreement)
    rows = [(row.step, row.values) for row in await metrics.rows(run)]
    assert rows == [
        (4, {"version": 1.0, "time/publish_stage": 3.0}),
        (4, {"time/publish_active": 500.0}),
        (5, {"version": 2.0}),
        (5, {"time/publish_active": 250.0}),
        (5, {"difference/mean": 0.25, "version": 2.0}),
    ]


async def test_rows_that_find_no_room_are_counted_and_others_follow(tmp_path):
    guard = DiskGuard(1 << 60)
    metrics = Metrics(tmp_path, guard)
    run = metrics.run()
    for number in range(3):
        metrics.executed(run, a_step(number + 1))
    assert await metrics.rows(run) == []
    assert metrics.registry.get_sample_value(DROPPED) == 3
    guard._min_free_bytes = 0
    metrics.executed(run, a_step(4))
    assert [row.step for row in await metrics.rows(run)] == [4]
    await metrics.store.close()


async def test_many_runs_at_a_time_keep_their_rows_and_numbers(metrics):
    runs = [metrics.run() for _ in range(300)]
    for number in (1, 2):
        for run in runs:
            metrics.executed(run, a_step(number))
        await metrics.store.written()
    for run in runs:
        assert [(row.number, row.step) for row in await metrics.rows(run)] == [(1, 1), (2, 2)]


async def test_nothing_is_written_for_a_run_that_is_being_deleted(metrics):
    run = metrics.run()
    row = StoredRow(step=0, source=RowSource.CLIENT, time=NOW, values={"a": 1.0}, request_id="one")
    metrics.executed(run, a_step())
    assert len(await metrics.rows(run)) == 1
    with metrics.store.watching(run) as change:
        async with metrics.recorder.deleting(run.run_id):
            file = metrics.volume.run(run.run_id) / layout.METRICS_FILE
            before = file.read_bytes()
            assert change.is_set()
            metrics.executed(run, a_step(2))
            with pytest.raises(errors.RunNotFound):
                await metrics.store.log(run, "one", row, [])
            await metrics.store.written()
            assert file.read_bytes() == before
            run.is_deleted = True
    with pytest.raises(errors.RunNotFound):
        metrics.store.check_watch(run)


async def test_a_row_is_with_its_watchers_soon_without_a_read(metrics):
    run = metrics.run()
    with metrics.store.watching(run) as change:
        metrics.executed(run, a_step())
        await asyncio.wait_for(change.wait(), 30)
    assert len(await metrics.rows(run)) == 1
