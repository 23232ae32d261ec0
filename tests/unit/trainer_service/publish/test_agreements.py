"""Which versions are compared with the trainer, and which failures to compare are errors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline import errors
from paceline.codec import model_ref_from_proto
from paceline.layout import new_run_id
from paceline.types import LoraConfig
from paceline.types.v1 import model_pb2
from paceline.weights.v1 import weight_service_pb2 as pb
from trainer_service.publish.agreements import Agreements
from trainer_service.publish.watch_hub import Watcher


class Engine:
    """An engine that computes nothing and finds no files where a version should be."""

    def __init__(self):
        self.loading, self.go_on = asyncio.Event(), asyncio.Event()

    def describe(self):
        return SimpleNamespace(vocab_size=8, max_context_length=8, dtype="float32")

    async def create_run(self, run_id, lora): ...

    async def delete_run(self, run_id): ...

    async def forward_backward(self, run_id, data, spec):
        raise errors.Unsupported("the base model is not scored")

    async def load_state(self, run_id, directory, *, with_optimizer):
        self.loading.set()
        await self.go_on.wait()
        raise errors.CheckpointNotFound(f"{directory} does not exist")


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_version_that_is_gone_is_an_error_unless_its_run_was_deleted(is_deleted, tmp_path):
    engine, watcher = Engine(), Watcher("one", {})
    agreements = Agreements(engine, lambda run, version: tmp_path, CollectorRegistry())
    run = SimpleNamespace(run_id=new_run_id(), parameters=LoraConfig(rank=1))
    with capture_logs() as logs:
        agreements.on_join(watcher)
        agreements.acknowledged(watcher, run, 1, is_refused=False)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await engine.loading.wait()
        if is_deleted:
            agreements.forget(run.run_id)
        engine.go_on.set()
        await asyncio.wait(tasks)
    found = [line["event"] for line in logs if "does not exist" in line.get("error", "")]
    assert found == ([] if is_deleted else ["sampler not compared with the trainer"])


class Scoring(Engine):
    """An engine that scores every version."""

    async def forward_backward(self, run_id, data, spec):
        return SimpleNamespace(loss_fn_outputs=[{"logprobs": np.zeros(7, np.float32)}])

    async def load_state(self, run_id, directory, *, with_optimizer): ...


async def settled(watcher):
    """Wait for what is scored; return the runs and versions that the sampler was asked to score."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)
    probes = [watcher.outbox.get_nowait().probe for _ in range(watcher.outbox.qsize())]
    return [(ref.run_id, ref.version) for ref in (model_ref_from_proto(probe.model) for probe in probes)]


class Moving(Scoring):
    """An engine to which a version's staged files are lost."""

    async def load_state(self, run_id, directory, *, with_optimizer):
        if directory.name == "staged":
            raise errors.CheckpointNotFound(f"{directory} does not exist")


async def test_a_version_whose_staged_files_are_removed_meanwhile_is_read_from_the_volume(tmp_path):
    places = iter([tmp_path / "staged", tmp_path / "volume"])
    watcher, run = Watcher("one", {}), SimpleNamespace(run_id=new_run_id(), parameters=LoraConfig(rank=1))
    agreements = Agreements(Moving(), lambda run, version: next(places), CollectorRegistry())
    agreements.on_join(watcher)
    await settled(watcher)
    agreements.acknowledged(watcher, run, 1, is_refused=False)
    assert await settled(watcher) == [(run.run_id, 1)]


async def test_the_first_version_of_each_run_that_a_sampler_acknowledges_since_it_joined_is_compared(tmp_path):
    runs = [SimpleNamespace(run_id=new_run_id(), parameters=LoraConfig(rank=1)) for _ in range(2)]
    agreements = Agreements(Scoring(), lambda run, version: tmp_path, CollectorRegistry())
    for watcher in (Watcher("one", {}), Watcher("one", {})):  # it reconnects
        agreements.on_join(watcher)
        assert len(await settled(watcher)) == 1  # the base model
        for run, version in zip(runs, (1, 3), strict=True):  # the second run's first versions were refused
            agreements.acknowledged(watcher, run, version, is_refused=False)
            assert await settled(watcher) == [(run.run_id, version)]
            model = model_pb2.ServedModel(run_id=run.run_id, version=version)
            agreements.record(watcher, pb.Agreement(model=model))
            agreements.acknowledged(watcher, run, version + 1, is_refused=False)
            assert await settled(watcher) == []
        agreements.on_leave(watcher, is_gone=False)


async def test_versions_are_compared_until_one_agrees_that_is_newer_than_those_that_do_not(tmp_path):
    """The results arrive in another order than the versions."""
    watcher, run = Watcher("one", {}), SimpleNamespace(run_id=new_run_id(), parameters=LoraConfig(rank=1))
    agreements = Agreements(Scoring(), lambda run, version: tmp_path, CollectorRegistry())

    async def compared(version, *, is_refused=False):
        agreements.acknowledged(watcher, run, version, is_refused=is_refused)
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)
        return [] if watcher.outbox.empty() else [model_ref_from_proto(watcher.outbox.get_nowait().probe.model).version]

    def answer(version, refusal=""):
        model = model_pb2.ServedModel(run_id=run.run_id, version=version)
        agreements.record(watcher, pb.Agreement(model=model, refusal=refusal))

    agreements.on_join(watcher)
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
    watcher.outbox.get_nowait()  # the probe of the base model
    assert await compared(1) == [1]
    assert await compared(2) == [2]
    answer(2, "differs")
    answer(1)
    assert await compared(3, is_refused=True) == [3]
    answer(3)
    assert await compared(4) == []
    assert await compared(5, is_refused=True) == [5], "the sampler still holds an older result against the run"
