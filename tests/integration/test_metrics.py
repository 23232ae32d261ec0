"""What the trainer records of a run, through kills, engine deaths and deletion; docs/metrics.md lists it."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from support.doc_pages import page, rows, section
from support.patience import PATIENCE
from support.stacks.cluster import wait_for
from support.stacks.warm_trainer import DATUM, WarmRun

from paceline import errors
from paceline.metrics.v1 import metrics_service_pb2 as metrics_pb
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb

pytestmark = pytest.mark.services

TIMES = {"time/wait", "time/forward_backward", "tokens_per_second"}


@pytest.fixture
def trainer(fresh_trainer):
    return fresh_trainer


class Metrics:
    """The metrics of a run."""

    def __init__(self, stub, run):
        self.stub, self.run_id = stub, run.run_id

    def call(self, method, request):
        try:
            return getattr(self.stub, method)(request, timeout=PATIENCE, wait_for_ready=True)
        except grpc.RpcError as failure:
            raise error_from_rpc(failure) from None

    def rows(self, **fields):
        return list(self.call("GetMetrics", metrics_pb.GetMetricsRequest(run_id=self.run_id, **fields)).rows)

    def steps(self):
        """Return the steps of the rows that steps made."""
        return [row.step for row in self.rows(names=["grad_norm"])]

    def log(self, request_id, **fields):
        return self.call(
            "LogMetrics", metrics_pb.LogMetricsRequest(run_id=self.run_id, request_id=request_id, **fields)
        )

    def rollouts(self, **fields):
        request = metrics_pb.GetRolloutsRequest(run_id=self.run_id, **fields)
        return list(self.call("GetRollouts", request).rollouts)

    def watch(self, **fields):
        return self.stub.WatchMetrics(
            metrics_pb.WatchMetricsRequest(run_id=self.run_id, **fields), timeout=PATIENCE, wait_for_ready=True
        )


def test_a_step_makes_a_row_of_what_its_passes_and_itself_replied(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        run.send("ForwardBackward", pb.ForwardBackwardRequest, data=[DATUM], loss_fn="cross_entropy", forward_only=True)
        assert metrics.rows() == []
        replies = [run.forward_backward(), run.forward_backward()]
        step = run.send("OptimStep", pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=1e-2))
        run.step()
        first, second = metrics.rows()
        tokens = sum(reply.metrics["tokens:sum"] for reply in replies)
        expected = {
            "loss:sum": sum(reply.metrics["loss:sum"] for reply in replies),
            "loss:mean": sum(reply.metrics["loss:sum"] for reply in replies) / tokens,
            "tokens:sum": tokens,
            "tokens": step.tokens,
            "sequences": 2,
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "time/optim_step": step.milliseconds,
        }
        assert {name: first.values[name] for name in expected} == pytest.approx(expected)
        assert (first.number, first.step, first.source) == (1, 1, metrics_pb.ROW_SOURCE_TRAINER)
        assert "time/between" not in first.values
        assert (second.number, second.step, second.values["sequences"]) == (2, 2, 1)
        assert second.values["time/between"] >= 0
        for row in (first, second):
            assert row.values.keys() >= TIMES
            assert row.values["memory/peak"] > 1 << 20


def test_every_value_of_the_trainer_is_documented(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        run.step()
        run.publish()
        found = {name for row in Metrics(service, run).rows() for name in row.values}
    documented = set(rows(section(page("metrics.md"), "What the trainer records")))
    of_losses = {name for name in found if re.search(r":(sum|mean)$", name)} - documented
    assert found - of_losses <= documented
    assert all(f"`{name}`" in page("losses.md") for name in of_losses)


def test_a_discarded_gradient_and_a_loaded_checkpoint_leave_no_pass_to_the_next_step(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        run.step()
        saved = run.save("one").path
        run.step()
        run.forward_backward()
        run.send("OptimStep", pb.OptimStepRequest, discard_gradient=pb.DiscardGradient())
        run.forward_backward()
        run.load(saved)
        run.step()
        metrics = Metrics(service, run)
        assert metrics.steps() == [1, 2, 2]
        assert metrics.rows()[-1].values["sequences"] == 1


def test_a_publish_and_its_first_acknowledgement_are_further_rows_of_the_step(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        run.step()
        run.publish()
        published = Metrics(service, run).rows()[-1]
        assert published.step == 1
        assert published.values["version"] == 1
        assert published.values["time/publish_stage"] > 0


@pytest.mark.parametrize(
    "point", ["before_execute:4", "after_execute:4", "after_answer:4", "before_ack:4", "after_capture:4", "after_ack:4"]
)
def test_a_kill_in_the_middle_of_a_step_repeats_and_loses_no_row(trainer, point):
    assert trainer.start(failpoints=point)
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        run.step()
        run.forward_backward()
        step = pb.OptimStepRequest(run_id=run.run_id, seq_id=4, adamw=pb.AdamwParams(learning_rate=1e-2))
        with pytest.raises(grpc.RpcError):
            stub.OptimStep(step, timeout=PATIENCE)
            stub.GetRun(pb.GetRunRequest(run_id=run.run_id), timeout=PATIENCE)
        assert trainer.service.wait(PATIENCE)
        assert trainer.start()
        run.seq_id = 4
        assert run.call("OptimStep", step).step == 2
        run.step()
        assert metrics.steps() == [1, 2, 3]
        assert [row.number for row in metrics.rows()] == [1, 2, 3]
        assert all(row.values["sequences"] == 1 for row in metrics.rows())


def test_rows_that_a_crash_has_cut_off_are_written_again_from_the_journal(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        for _ in range(3):
            run.step()
        run.publish()
        run.forward_backward()
        before = metrics.rows()
        trainer.kill()
        file = trainer.volume / "runs" / run.run_id / "metrics.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(lines[0] + lines[1][:50])
        assert trainer.start()
        after = metrics.rows()
        assert [(row.number, row.step) for row in after] == [(row.number, row.step) for row in before]
        for old, new in zip(before, after, strict=True):
            assert not set(new.values) - set(old.values)
            kept = {name: value for name, value in new.values.items() if not name.startswith("time/")}
            assert kept == {name: old.values[name] for name in kept}
        assert {"loss:sum", "grad_norm", "time/optim_step"} <= after[2].values.keys()
        # The pass before the kill counts to the step after it, whose times are then not known.
        run.send("OptimStep", pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=1e-2))
        last = metrics.rows()[-1]
        assert (last.step, last.values["sequences"]) == (4, 1)
        assert not TIMES & last.values.keys()


def test_an_engine_that_dies_in_a_step_makes_no_second_row(trainer):
    assert trainer.start(failpoints="engine_OptimStep:2")
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        assert [run.step().step for _ in range(3)] == [1, 2, 3]
        assert "engine died" in trainer.text()
        assert Metrics(service, run).steps() == [1, 2, 3]


def test_what_a_client_logs_is_there_once_whatever_is_repeated_also_after_a_kill(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        run.step()
        values = {"reward": 0.5, "nan": math.nan, "a/b:c@d e-f.g_h": -math.inf}
        rollouts = [metrics_pb.Rollout(prompt=f"p{n}", completion="é", reward=n, extras={"k": "v"}) for n in range(3)]
        first = metrics.log("one", values=values, rollouts=rollouts)
        assert (first.number, first.rollout_number) == (2, 3)
        assert metrics.log("one", values=values, rollouts=rollouts) == first
        trainer.kill()
        assert trainer.start()
        assert metrics.log("one", values=values, rollouts=rollouts) == first
        assert metrics.log("two", values={"reward": 1.0}, step=17).number == 3
        _, logged, other = metrics.rows()
        assert (logged.step, logged.source, other.step) == (1, metrics_pb.ROW_SOURCE_CLIENT, 17)
        assert math.isnan(logged.values.pop("nan"))
        assert dict(logged.values) == {"reward": 0.5, "a/b:c@d e-f.g_h": -math.inf}
        assert [row.rollout for row in metrics.rollouts()] == rollouts[::-1]
        assert [row.step for row in metrics.rollouts(after=0)] == [1, 1, 1]
        assert metrics.rollouts(step=2) == []


def test_rollouts_that_a_crash_cut_in_the_middle_of_a_call_are_completed_when_it_is_repeated(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        rollouts = [metrics_pb.Rollout(completion=str(number)) for number in range(4)]
        metrics.log("one", rollouts=rollouts)
        trainer.kill()
        file = trainer.volume / "runs" / run.run_id / "rollouts.jsonl"
        file.write_bytes(file.read_bytes()[:-40])
        assert trainer.start()
        assert metrics.log("one", rollouts=rollouts).rollout_number == 4
        assert [row.rollout.completion for row in metrics.rollouts(after=0)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({}, errors.MissingField, "values"),
        ({"values": {"": 1.0}}, errors.InvalidName, "values[]"),
        ({"values": {"a\n": 1.0}}, errors.InvalidName, "values[a\n]"),
        ({"values": {f"{n}": 1.0 for n in range(257)}}, errors.OutOfRange, "values"),
        ({"rollouts": [metrics_pb.Rollout()] * 65}, errors.OutOfRange, "rollouts"),
        ({"rollouts": [metrics_pb.Rollout(prompt="p" * 40_000, completion="c" * 40_000)]}, errors.OutOfRange, None),
        ({"values": {"a": 1.0}, "request_id": ""}, errors.MissingField, "request_id"),
    ],
)
def test_what_cannot_be_logged_is_refused_by_its_field_and_changes_nothing(trainer, fields, error, field):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        with pytest.raises(error) as caught:
            metrics.log(fields.pop("request_id", "one"), **fields)
        assert caught.value.field == (field or "rollouts[0]")
        assert metrics.rows() == metrics.rollouts() == []


def test_a_watch_gets_each_row_as_it_is_written_and_ends_with_its_run(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service, ThreadPoolExecutor(1) as thread:
        run = WarmRun(stub)
        metrics, seen, begun = Metrics(service, run), [], []

        def watch():
            try:
                for message in metrics.watch():
                    begun.append(True)
                    seen.extend(row.number for row in message.rows)
            except grpc.RpcError as failure:
                return error_from_rpc(failure)

        run.step()
        watching = thread.submit(watch)
        wait_for(lambda: seen == [1], PATIENCE)
        for number in (2, 3):
            run.step()
            wait_for(lambda number=number: seen[-1] == number, PATIENCE)
        metrics.log("one", values={"reward": 1.0})
        wait_for(lambda: seen == [1, 2, 3, 4], PATIENCE)
        run.delete()
        assert isinstance(watching.result(PATIENCE), errors.RunNotFound)


def test_a_watch_tells_at_once_that_it_watches_and_what_comes_after_a_number(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        assert [len(message.rows) for message in metrics.watch(max_seconds=0)] == [0]
        run.step()
        run.step()
        assert [row.number for message in metrics.watch(max_seconds=0, after=1) for row in message.rows] == [2]
        watch = metrics.watch(after=2)
        assert not next(iter(watch)).rows
        trainer.service.stop()
        with pytest.raises(grpc.RpcError) as caught:
            list(watch)
        assert isinstance(error_from_rpc(caught.value), errors.Unavailable)
        assert trainer.service.wait(PATIENCE)


def test_a_deleted_run_has_no_metrics_and_its_files_are_gone(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        run.step()
        run.save("kept")
        metrics.log("one", values={"reward": 1.0}, rollouts=[metrics_pb.Rollout(prompt="p")])
        folder = trainer.volume / "runs" / run.run_id
        assert {"metrics.jsonl", "rollouts.jsonl"} <= {path.name for path in folder.iterdir()}
        run.delete()
        assert not {"metrics.jsonl", "rollouts.jsonl"} & {path.name for path in folder.iterdir()}
        for call in (metrics.rows, metrics.rollouts, lambda: metrics.log("two", values={"reward": 1.0})):
            with pytest.raises(errors.RunNotFound):
                call()


def test_files_stay_bounded_and_count_among_the_tenants_bytes(trainer):
    assert trainer.start(metrics_max_bytes_per_run=8192, rollouts_max_bytes_per_run=8192)
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        folder = trainer.volume / "runs" / run.run_id
        for number in range(100):
            text = f"{number}" * 100
            metrics.log(f"r{number}", values={"reward": number}, rollouts=[metrics_pb.Rollout(completion=text)])
        run.step()
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            assert 0 < (folder / name).stat().st_size <= 8192
        numbers = [row.number for row in metrics.rows()]
        assert numbers[-1] == 101
        assert len(numbers) < 101
        kept = [row.number for row in metrics.rollouts()]
        assert kept == list(range(100, 100 - len(kept), -1))
        used = run.call("GetUsage", pb.GetUsageRequest()).quotas
        (volume,) = (quota.used for quota in used if quota.name == "volume_bytes")
        counted = [folder / name for name in ("metrics.jsonl", "rollouts.jsonl")]
        assert volume >= sum(path.stat().st_size for path in counted)


def test_a_full_volume_refuses_what_clients_log_and_keeps_what_is_there(trainer):
    assert trainer.start(max_volume_bytes_per_tenant=30_000)
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        metrics.log("one", values={"reward": 1.0}, rollouts=[metrics_pb.Rollout(completion="c")])
        with pytest.raises(errors.QuotaExceeded):
            metrics.log("two", values={"reward": 2.0}, rollouts=[metrics_pb.Rollout(completion="c" * 30_000)])
        assert [row.values["reward"] for row in metrics.rows()] == [1.0]
        assert [row.rollout.completion for row in metrics.rollouts()] == ["c"]


def test_rows_that_cannot_be_written_hinder_no_command_and_are_reported_once(trainer):
    assert trainer.start()
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        metrics = Metrics(service, run)
        obstacle = trainer.volume / "runs" / run.run_id / "metrics.jsonl"
        obstacle.mkdir()
        assert [run.step().step for _ in range(3)] == [1, 2, 3]
        wait_for(lambda: "rows of metrics cannot be written" in trainer.text(), PATIENCE)
        for call in (metrics.rows, lambda: metrics.log("one", values={"reward": 1.0})):
            with pytest.raises(errors.EngineUnavailable):
                call()
        obstacle.rmdir()
        run.step()
        assert metrics.steps() == [4]
        assert trainer.text().count("rows of metrics cannot be written") == 1


def test_nothing_of_a_rollouts_text_is_logged(trainer):
    assert trainer.start(log_level="DEBUG")
    with trainer.connect() as stub, trainer.metrics() as service:
        run = WarmRun(stub)
        rollout = metrics_pb.Rollout(prompt="secret-prompt", completion="secret-text", extras={"k": "secret-extra"})
        Metrics(service, run).log("one", rollouts=[rollout])
        with pytest.raises(errors.OutOfRange):
            rollout.prompt = "secret-large" * 6000
            Metrics(service, run).log("two", rollouts=[rollout, rollout])
        assert "secret-" not in trainer.text()
        lines = (trainer.volume / "runs" / run.run_id / "rollouts.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["prompt"] == "secret-prompt"
