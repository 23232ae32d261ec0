"""Which failures to compare a sampler with the trainer are errors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline import errors
from paceline.layout import new_run_id
from paceline.types import LoraConfig
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
