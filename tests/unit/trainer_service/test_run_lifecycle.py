"""Work started for a caller that leaves is finished, and exists once when it is requested again."""

from __future__ import annotations

import asyncio
import errno
import os
from datetime import timedelta
from threading import Event
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from support.patience import PATIENCE

from paceline import errors, layout
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import Identity
from paceline.types import LoraConfig, ModelInfo
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.engine_link.protocol import AdapterInfo
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.metrics.recorder import Recorder
from trainer_service.metrics.store import MetricsStore
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
def engine():
    return Engine()


@pytest.fixture
async def registry(volume):
    settings = TrainerSettings(model="tiny", checkpoint_dir=volume.root, min_free_bytes=0, insecure=True)
    storage = RunStorage(volume, settings, NO_FAILPOINTS, WaitingBytes(), NO_GUARD)
    registry = RunRegistry(volume, storage, DiskGuard(volume=volume))
    await registry.restore()
    yield registry
    await registry.close()


@pytest.fixture
def lifecycle(volume, engine, registry):
    publisher = SimpleNamespace(cancel_waits=nothing, forget=nothing)
    store = MetricsStore(volume, NO_GUARD, CollectorRegistry(), 1 << 20, 1 << 20)
    return RunLifecycle(64, engine, registry, CheckpointStore(volume), publisher, lambda *_: None, Recorder(store))


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


async def test_a_run_is_made_once_when_its_caller_leaves_while_it_is_written(lifecycle, engine, volume, monkeypatch):
    await leave(lifecycle.create_run(TEAM, *REQUEST), monkeypatch, registry_module, "write_run_file")
    record = await lifecycle.create_run(TEAM, *REQUEST)
    assert engine.made == [record.run_id]
    assert [folder.name for folder in volume.runs.iterdir()] == [record.run_id]
    assert {"journal", "run.json", "run.copy.json"} <= {path.name for path in volume.run(record.run_id).iterdir()}


async def test_a_run_that_is_made_after_another_is_newer_though_the_clock_was_set_back(lifecycle):
    first = await lifecycle.create_run(TEAM, *REQUEST)
    first.create_time += timedelta(seconds=1_000)  # the clock was ahead then
    second = await lifecycle.create_run(TEAM, "another", *REQUEST[1:])
    assert second.create_time > first.create_time


async def test_an_attachment_whose_caller_left_does_not_undo_the_next_one(lifecycle, volume, monkeypatch):
    record = await lifecycle.create_run(TEAM, *REQUEST)
    began, go_on, written, real = Event(), Event(), Event(), registry_module.write_run_file

    def slow(folder, content):
        if content["attachment"] == 1:
            began.set()
            go_on.wait()
        real(folder, content)
        if content["attachment"] == 1:
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


REFUSALS = {"full": errors.DiskFull("full"), "failing": OSError(errno.EIO, os.strerror(errno.EIO))}


@pytest.mark.parametrize("reached_the_file", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_an_attachment_that_was_refused_supersedes_nobody_later_either(
    lifecycle, registry, volume, monkeypatch, refusal, reached_the_file
):
    real = registry_module.write_run_file

    def refuse(*arguments):
        if reached_the_file:  # for example where the folder cannot be synced after the rename
            real(*arguments)
        raise refusal

    record = await lifecycle.create_run(TEAM, *REQUEST)
    assert await lifecycle.attach(record, "one") == 1
    with monkeypatch.context() as patch:
        patch.setattr(registry_module, "write_run_file", refuse)
        for request in ("another", "one"):
            with pytest.raises(type(refusal)):
                await lifecycle.attach(record, request)
            assert read_run_file(volume.run(record.run_id))["attachment"] == record.sequencer.attachment == 1
    await registry.persist(record)
    assert read_run_file(volume.run(record.run_id))["attachment"] == 1
    assert await lifecycle.attach(record, "one") == 1
    assert await lifecycle.attach(record, "another") == 2


async def test_no_two_clients_get_one_number_when_an_attachment_is_refused_while_it_is_repeated(
    lifecycle, volume, monkeypatch
):
    began, go_on, real = Event(), Event(), registry_module.write_run_file

    def refuse_the_first(*arguments):
        if not began.is_set():
            began.set()
            go_on.wait()
            raise errors.DiskFull("full")
        real(*arguments)

    record = await lifecycle.create_run(TEAM, *REQUEST)
    assert await lifecycle.attach(record, "one") == 1
    monkeypatch.setattr(registry_module, "write_run_file", refuse_the_first)
    attaching = asyncio.create_task(lifecycle.attach(record, "another"))
    assert await asyncio.to_thread(began.wait, PATIENCE)
    repeating = asyncio.create_task(lifecycle.attach(record, "another"))
    await asyncio.wait({repeating}, timeout=0.1)
    go_on.set()
    with pytest.raises(errors.DiskFull):
        await attaching
    assert await repeating == 2
    content = read_run_file(volume.run(record.run_id))
    assert (content["attachment"], content["attached"]) == (2, {"one": 1, "another": 2})
    assert await lifecycle.attach(record, "third") == 3


async def test_what_else_is_written_meanwhile_does_not_attach_a_client_that_is_refused(
    lifecycle, registry, volume, monkeypatch
):
    began, go_on, real, written = Event(), Event(), registry_module.write_run_file, []

    def refuse_clients(folder, content):
        began.set()
        go_on.wait()
        if content["attachment"]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(folder, content)
        written.append(content["attachment"])

    record = await lifecycle.create_run(TEAM, *REQUEST)
    monkeypatch.setattr(registry_module, "write_run_file", refuse_clients)
    first = asyncio.create_task(registry.persist(record))
    assert await asyncio.to_thread(began.wait, PATIENCE)
    second = asyncio.create_task(registry.persist(record))
    attaching = asyncio.create_task(lifecycle.attach(record, "one"))
    await asyncio.wait({second, attaching}, timeout=0.1)
    go_on.set()
    with pytest.raises(OSError, match="Input/output"):
        await attaching
    await asyncio.gather(first, second)
    assert set(written) == {0}
    assert read_run_file(volume.run(record.run_id))["attachment"] == 0


async def test_a_run_is_deleted_whole_when_its_caller_leaves_meanwhile(lifecycle, registry, volume, monkeypatch):
    record = await lifecycle.create_run(TEAM, *REQUEST)
    deleting = lifecycle.delete_run(record, delete_checkpoints=True)
    await leave(deleting, monkeypatch, DeletedRuns, "delete_files")
    async with record.recovering:
        assert record.is_deleted
    assert registry.owned_by(TEAM) == []
    assert list(volume.runs.iterdir()) == []
