"""Work started for a caller that leaves is finished, and exists once when it is requested again."""

from __future__ import annotations

import asyncio
from threading import Event
from types import SimpleNamespace

import pytest
from support.patience import PATIENCE

from paceline import errors, layout
from paceline.rpc.identity import Identity
from paceline.types import LoraConfig, ModelInfo
from paceline.waiting_bytes import WaitingBytes
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.engine.protocol import AdapterInfo
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.run_lifecycle import RunLifecycle
from trainer_service.runs import registry as registry_module
from trainer_service.runs.deletion import DeletedRuns
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.storage import RunStorage
from trainer_service.settings import TrainerSettings
from trainer_service.volume_files import read_run_file

TEAM = Identity("team")
REQUEST = ("request", b"digest", "tiny", LoraConfig(rank=4, alpha=8.0), {})


class Engine:
    def __init__(self):
        self.made = []

    def describe(self):
        return ModelInfo("tiny", max_context_length=64, vocab_size=96, dtype="float32", max_lora_rank=8, num_layers=2)

    async def create_run(self, run_id, parameters):
        self.made.append(run_id)
        return AdapterInfo(1)

    async def delete_run(self, run_id):
        pass


async def nothing(*_):
    pass


@pytest.fixture
def volume(tmp_path):
    return layout.Volume(tmp_path / "volume")


@pytest.fixture
async def lifecycle(volume):
    settings = TrainerSettings(model="tiny", checkpoint_dir=volume.root, min_free_bytes=0, insecure=True)
    storage = RunStorage(volume, settings, NO_FAILPOINTS, WaitingBytes(), NO_GUARD)
    registry = RunRegistry(volume, storage, DiskGuard(volume=volume))
    await registry.restore()
    publisher = SimpleNamespace(cancel_waits=nothing, forget=nothing)
    yield RunLifecycle(64, Engine(), registry, CheckpointStore(volume), publisher, lambda *_: None)
    await registry.close()


async def leave(work, monkeypatch, module, name):
    """Start work, and cancel it while `module.name` runs in a thread."""
    began, go_on, real = Event(), Event(), getattr(module, name)

    def slow(*arguments, **options):
        began.set()
        go_on.wait()
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, slow)
        calling = asyncio.create_task(work)
        assert await asyncio.to_thread(began.wait, PATIENCE)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        go_on.set()


async def test_a_run_is_made_once_when_its_caller_leaves_while_it_is_written(lifecycle, volume, monkeypatch):
    await leave(lifecycle.create_run(TEAM, *REQUEST), monkeypatch, registry_module, "write_run_file")
    record = await lifecycle.create_run(TEAM, *REQUEST)
    assert lifecycle._engine.made == [record.run_id]
    assert [folder.name for folder in volume.runs.iterdir()] == [record.run_id]
    assert {"journal", "run.json", "run.copy.json"} <= {path.name for path in volume.run(record.run_id).iterdir()}


async def test_an_attachment_whose_caller_left_does_not_undo_the_next_one(lifecycle, volume, monkeypatch):
    record = await lifecycle.create_run(TEAM, *REQUEST)
    began, go_on, written, real = Event(), Event(), Event(), registry_module.write_run_file

    def slow(folder, facts):
        if facts["attachment"] == 1:
            began.set()
            go_on.wait()
        real(folder, facts)
        if facts["attachment"] == 1:
            written.set()

    monkeypatch.setattr(registry_module, "write_run_file", slow)
    one = asyncio.create_task(lifecycle.attach(record, "one"))
    assert await asyncio.to_thread(began.wait, PATIENCE)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    another = asyncio.create_task(lifecycle.attach(record, "another"))
    await asyncio.wait({another}, timeout=0.5)
    go_on.set()
    assert await asyncio.to_thread(written.wait, PATIENCE)
    assert await another == 2
    assert read_run_file(volume.run(record.run_id))["attachment"] == 2


async def test_an_attachment_that_was_refused_supersedes_nobody_later_either(lifecycle, volume, monkeypatch):
    def full(*_):
        raise errors.DiskFull("full")

    record = await lifecycle.create_run(TEAM, *REQUEST)
    assert await lifecycle.attach(record, "one") == 1
    with monkeypatch.context() as patch:
        patch.setattr(registry_module, "write_run_file", full)
        for request in ("another", "one"):
            with pytest.raises(errors.DiskFull):
                await lifecycle.attach(record, request)
    await lifecycle._registry.persist(record)
    assert read_run_file(volume.run(record.run_id))["attachment"] == 1
    assert await lifecycle.attach(record, "one") == 1


async def test_a_run_is_deleted_whole_when_its_caller_leaves_meanwhile(lifecycle, volume, monkeypatch):
    record = await lifecycle.create_run(TEAM, *REQUEST)
    deleting = lifecycle.delete_run(record, delete_checkpoints=True)
    await leave(deleting, monkeypatch, DeletedRuns, "delete_files")
    async with record.recovering:
        assert record.is_deleted
    assert lifecycle._registry.owned_by(TEAM) == []
    assert list(volume.runs.iterdir()) == []
