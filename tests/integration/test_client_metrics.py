"""Metrics through the client and the gateway: logged, read, watched through a restart, and absent for other tenants."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.cluster import Cluster, wait_for

import paceline
from paceline import errors
from paceline.files.key_changes import add_key

DATA = [paceline.Datum.from_completion([1, 2, 3], [4, 5, 6])]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "state").mkdir()
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"))
    with cluster.running():
        yield cluster


@pytest.fixture
def training(service):
    training = service.create_lora_training_client(rank=2)
    yield training
    service.delete_run(training.run_id, delete_checkpoints=True)


def step(training):
    training.forward_backward(DATA)
    return training.optim_step().result()


def test_curves_have_a_value_for_each_step_of_the_trainer_and_of_the_client(service, training):
    steps = [step(training) for _ in range(3)]
    numbers = [training.log({"reward": np.float32(0.5)}), training.log({"late": math.nan, "whole": 3}, step=2)]
    assert [number.result() for number in numbers] == [4, 5]
    metrics = training.metrics()
    assert metrics.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(metrics["grad_norm"], [one.grad_norm for one in steps])
    np.testing.assert_array_equal(metrics["reward"], [math.nan, math.nan, 0.5])
    np.testing.assert_array_equal(metrics["whole"], [math.nan, 3, math.nan])
    assert [row.source.name for row in metrics.rows] == ["TRAINER"] * 3 + ["CLIENT"] * 2
    assert "3 steps, 1 to 3" in repr(metrics)
    named = service.metrics(training.run_id, ["reward", "loss:mean"])
    assert sorted(named) == ["loss:mean", "reward"]
    assert service.metrics(training.run_id, ["grad_norm"], at_most_points=2).steps.tolist() == [1, 3]
    with pytest.raises(KeyError, match="grad_norm"):
        metrics["gradnorm"]


def test_a_publish_tells_how_long_it_took_until_samplers_had_it_and_how_far_they_differ(service, training):
    step(training)
    training.publish_weights().result()
    wanted = ["version", "time/publish_stage", "time/publish_active", "difference/mean"]
    wait_for(lambda: len(service.metrics(training.run_id, wanted)) == len(wanted), PATIENCE)
    metrics = training.metrics()
    assert metrics.steps.tolist() == [1]
    assert metrics["version"].tolist() == [1]
    assert metrics["time/publish_active"][0] > metrics["time/publish_stage"][0] > 0
    assert 0 <= metrics["difference/mean"][0] < 1e-3


def test_what_is_logged_keeps_its_order_and_is_there_once_the_client_is_closed(cluster, service, training):
    with paceline.ServiceClient(cluster.address, cluster.api_key) as other:
        logging = other.get_training_client(training.run_id)
        for number in range(50):
            logging.log({"number": number})
    assert [row.values["number"] for row in service.metrics(training.run_id).rows] == list(range(50))


def test_rollouts_come_back_as_they_were_logged(service, training):
    logged = [paceline.Rollout("2 + 2 = ", str(n), float(n), env="sums", attempt=n) for n in range(150)]
    assert training.log_rollouts(logged).result() == 150
    found = service.rollouts(training.run_id, limit=120)
    assert [row.rollout for row in found] == logged[:29:-1]
    assert found[0].rollout.extras == {"env": "sums", "attempt": "149"}
    assert [row.number for row in service.rollouts(training.run_id, 0, limit=2)] == [150, 149]
    assert service.rollouts(training.run_id, 1) == []


@pytest.mark.parametrize(
    ("log", "error", "field"),
    [
        (lambda training: training.log({"a": "b"}), errors.InvalidArgument, "values[a]"),
        (lambda training: training.log([1.0]), errors.InvalidArgument, "values"),
        (lambda training: training.log({}), errors.MissingField, "values"),
        (lambda training: training.log({"ä": 1}), errors.InvalidName, "values[ä]"),
        (lambda training: training.log({"a": 1}, step=-1), errors.OutOfRange, "step"),
        (lambda training: training.log_rollouts([]), errors.EmptyBatch, "rollouts"),
        (lambda training: training.log_rollouts(["a"]), errors.InvalidArgument, "rollouts[0]"),
        (lambda training: training.log_rollouts(paceline.Rollout()), errors.InvalidArgument, "rollouts"),
        (lambda training: training.log_rollouts([paceline.Rollout("p" * 70_000)]), errors.OutOfRange, None),
    ],
)
def test_what_cannot_be_logged_is_refused_by_the_name_of_its_field(training, log, error, field):
    with pytest.raises(error) as caught:
        log(training).result()
    assert caught.value.field == (field or "rollouts[0].prompt")


def test_a_watch_goes_on_through_a_restart_and_ends_with_the_run(cluster, service):
    training = service.create_lora_training_client(rank=2)
    seen, watches = [], Event()

    def watch():
        for row in service.watch_metrics(training.run_id):
            seen.append(row.number)
            watches.set()

    with ThreadPoolExecutor(1) as thread:
        step(training)
        watching = thread.submit(watch)
        assert watches.wait(PATIENCE)
        cluster.trainer.kill()
        cluster.trainer.start()
        step(training)
        training.log({"reward": 1.0}).result()
        wait_for(lambda: seen == [1, 2, 3], PATIENCE)
        service.delete_run(training.run_id)
        with pytest.raises(errors.RunNotFound):
            watching.result(PATIENCE)


async def test_a_watch_is_left_and_closed_in_an_event_loop(service, training):
    await training.log({"reward": 1.0})
    async with service.watch_metrics(training.run_id) as watch:
        async for row in watch:
            assert dict(row.values) == {"reward": 1.0}
            break
    assert (await training.metrics_async()).steps.tolist() == [0]
    assert await service.rollouts_async(training.run_id) == []


def test_another_tenants_metrics_look_absent(cluster, training):
    training.log({"reward": 1.0}).result()
    key = add_key(cluster.state / "keys.json", "stranger", "stranger")
    with paceline.ServiceClient(cluster.address, key) as stranger:
        for call in (
            lambda: stranger.metrics(training.run_id),
            lambda: stranger.rollouts(training.run_id),
            lambda: next(iter(stranger.watch_metrics(training.run_id))),
        ):
            with pytest.raises(errors.RunNotFound):
                call()
