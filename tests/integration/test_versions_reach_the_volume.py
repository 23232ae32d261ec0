"""A version published without `durable` is on the volume before anything relies on that."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.stacks.cluster import wait_for
from support.stacks.trainer_parts import TEAM, TrainerParts

from paceline import codec, errors, layout, weights
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CheckpointKind, Datum, FullParameters
from paceline.weights.v1 import weight_service_pb2 as wpb
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.options import EngineOptions
from trainer_service.journal.format import AnswerRecord
from trainer_service.publish.watch_hub import AckPolicy, Watcher
from trainer_service.runs.command import Command
from trainer_service.runs.progress import CommandProgress
from trainer_service.volume_files import read_run_file

SNAPSHOT_AFTER = 4
"""In commands."""
KEPT_VERSIONS = 8
COPY = shutil.copy2
ADAM = pb.AdamwParams(learning_rate=1e-3)
DATUM = Datum(np.arange(4, dtype=np.int32), {"target_tokens": np.arange(4), "weights": np.ones(4, np.float32)})


class SlowCopy(Watcher):
    """Blocks the copy of an announced version to the volume, by a lease on one of the files to copy."""

    def __init__(self, trainer):
        super().__init__("slow copy", {})
        self.trainer = trainer
        self.file = -1

    def announce(self, announcement):
        if not announcement.volume_path:
            version = announcement.manifest.model.version
            self.file = os.open(
                self.trainer.publisher.find(self.trainer.run, version) / layout.CONFIG_FILE, os.O_RDONLY
            )
            fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # opening it now blocks

    def go_on(self):
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class Commander:
    """Sends a run's commands, in order, as the service does."""

    def __init__(self, trainer):
        volume, run_id = trainer.volume, trainer.run.run_id
        self.trainer = trainer
        self.version = volume.version(run_id, 1)
        self.snapshot = volume.run(run_id) / "snapshots" / str(SNAPSHOT_AFTER)
        self.seq_id = 0

    def send(self, message, **fields):
        self.seq_id += 1
        request = message(run_id=self.trainer.run.run_id, seq_id=self.seq_id, **fields)
        return asyncio.ensure_future(self.trainer.run.sequencer.execute(Command.of(request, TEAM)))

    async def train(self):
        await self.send(
            pb.ForwardBackwardRequest, data=[codec.datum_to_proto(DATUM)], loss_fn="cross_entropy", forward_only=True
        )


@contextmanager
def full_disk(monkeypatch, name, number=errno.ENOSPC):
    """Make a function fail as on a full disk, or with another error number."""

    def fail(*_):
        raise layout.translate_os_error(OSError(number, os.strerror(number)))

    with monkeypatch.context() as patch:
        patch.setattr(name, fail)
        yield


@contextmanager
def full_for_the_first(monkeypatch):
    """Make a disk that takes any version but the first."""

    def copy(source, target):
        if source.parent.name == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return COPY(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.publish.volume_copies.shutil.copy2", copy)
        yield


async def restart_with_the_second_of_two_on_the_volume(trainer, commander, monkeypatch):
    """Publish two versions, of which the volume takes only the second; restart the trainer."""
    with full_for_the_first(monkeypatch):
        with pytest.raises(errors.DiskFull):
            await commander.send(pb.PublishWeightsRequest, durable=True)
        await commander.send(pb.PublishWeightsRequest, durable=True)
        await trainer.restart()


def unreadable(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(autouse=True)
def leases_are_quiet():
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent when an open of the file blocks
    yield
    signal.signal(signal.SIGIO, before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory, forked_engines):
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    async with EngineProcess(EngineOptions(str(model), "tiny")) as engine:
        yield engine


@pytest.fixture
def keep_versions():
    return KEPT_VERSIONS


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(engine, tmp_path, keep_versions):
    async with TrainerParts(engine, tmp_path, keep_versions, SNAPSHOT_AFTER) as parts:
        yield parts


@pytest.fixture
def commander(trainer):
    return Commander(trainer)


@pytest_asyncio.fixture(loop_scope="module")
async def slow(trainer):
    slow = SlowCopy(trainer)
    yield slow
    slow.go_on()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_copy_starts_when_the_answer_to_the_publish_is_durable(trainer, commander, monkeypatch):
    go_on, journal = asyncio.Event(), trainer.run.sequencer.journal
    append = journal.append

    async def append_late(record):
        await go_on.wait()
        await append(record, sync=True)

    def append_answers_late(record, *, sync):
        is_answer = isinstance(record, AnswerRecord)
        return asyncio.ensure_future(append_late(record)) if is_answer else append(record, sync=sync)

    monkeypatch.setattr(journal, "append", append_answers_late)
    monkeypatch.setattr("trainer_service.publish.volume_copies.ANSWER_SECONDS", 60.0)
    publishing = commander.send(pb.PublishWeightsRequest)
    copied = asyncio.create_task(asyncio.to_thread(wait_for, commander.version.exists))
    assert not (await asyncio.wait({copied}, timeout=0.5))[0]
    go_on.set()
    await publishing
    await copied


@pytest.mark.asyncio(loop_scope="module")
async def test_a_silent_sampler_does_not_keep_a_version_from_the_volume(trainer, commander, monkeypatch):
    monkeypatch.setattr("trainer_service.publish.volume_copies.ANSWER_SECONDS", 0.05)
    await trainer.hub.join(sampler := Watcher("silent", {}))
    publishing = commander.send(pb.PublishWeightsRequest, wait_for=AckPolicy.ALL.value, ack_timeout_ms=60_000)
    await asyncio.to_thread(wait_for, commander.version.exists)
    assert not publishing.done()
    await acknowledge(trainer, sampler)
    await publishing


@pytest.mark.asyncio(loop_scope="module")
async def test_a_version_that_is_copied_after_a_newer_one_does_not_stay_in_memory(trainer, commander, monkeypatch):
    monkeypatch.setattr("trainer_service.publish.volume_copies.ANSWER_SECONDS", 60.0)
    await trainer.hub.join(sampler := Watcher("slow", {}))
    first = commander.send(pb.PublishWeightsRequest, wait_for=AckPolicy.ALL.value, ack_timeout_ms=60_000)
    await commander.send(pb.PublishWeightsRequest)
    await asyncio.to_thread(wait_for, commander.version.with_name("2").exists)
    assert not commander.version.exists()
    await acknowledge(trainer, sampler)
    await first
    await trainer.publisher.settled(trainer.run.run_id)
    assert commander.version.exists()
    assert trainer.staged() == [2]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_version_is_on_the_volume_although_no_sampler_acknowledged_it(trainer, commander, monkeypatch):
    monkeypatch.setattr("trainer_service.publish.volume_copies.ANSWER_SECONDS", 60.0)
    await trainer.hub.join(Watcher("silent", {}))
    with pytest.raises(errors.AckTimeout):
        await commander.send(pb.PublishWeightsRequest, wait_for=AckPolicy.ALL.value, ack_timeout_ms=10)
    await trainer.publisher.settled(trainer.run.run_id)
    assert (commander.version / layout.WEIGHTS_FILE).exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_before_a_load_answers(trainer, commander, slow):
    await trainer.hub.join(slow)
    kind = CheckpointKind.STATE.value
    path = (await commander.send(pb.SaveCheckpointRequest, name="before", kind=kind)).checkpoint.path
    await commander.send(pb.PublishWeightsRequest)
    loading = commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
    assert not (await asyncio.wait({loading}, timeout=1))[0]
    assert not commander.version.exists()
    slow.go_on()
    await loading
    assert (commander.version / layout.WEIGHTS_FILE).exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_before_a_snapshot_counts(trainer, commander, slow):
    await trainer.hub.join(slow)
    await commander.send(pb.PublishWeightsRequest)
    for _ in range(SNAPSHOT_AFTER - 1):
        await commander.train()
    appearing = asyncio.create_task(asyncio.to_thread(wait_for, commander.snapshot.exists))
    assert not (await asyncio.wait({appearing}, timeout=1))[0]
    assert any(commander.snapshot.parent.glob(".new-*/*")), "the state itself is written"
    assert not commander.version.exists()
    slow.go_on()
    await appearing
    assert (commander.version / layout.WEIGHTS_FILE).exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_volume_failed_to_take_is_copied_again_and_leaves_nothing_staged(
    trainer, commander, monkeypatch
):
    run_id = trainer.run.run_id
    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.publish.volume_copies.shutil.copy2", unreadable)
        await commander.send(pb.PublishWeightsRequest)
        await trainer.copies_failed(1)
    assert not commander.version.exists()
    await trainer.publisher.settled(run_id)
    assert (commander.version / layout.WEIGHTS_FILE).exists()
    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.publish.volume_copies.shutil.copy2", unreadable)
        await commander.send(pb.PublishWeightsRequest)
        await trainer.copies_failed(2)
    for _ in range(KEPT_VERSIONS):
        await commander.send(pb.PublishWeightsRequest, durable=True)
    await trainer.publisher.settled(run_id)
    assert trainer.staged() == [2 + KEPT_VERSIONS]


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_volume_failed_to_take_is_copied_again_by_itself_once_there_is_space(
    trainer, commander, monkeypatch
):
    checks, copy2 = [], shutil.copy2

    def check_free(directory, size):
        checks.append(size)
        if len(checks) < 3:
            raise errors.DiskFull("full")

    def copy(source, target):
        if not checks:
            monkeypatch.setattr(trainer.guard, "check_free", check_free)
            unreadable()
        return copy2(source, target)

    monkeypatch.setattr("trainer_service.publish.volume_copies.COPY_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr("trainer_service.publish.volume_copies.shutil.copy2", copy)
    await trainer.hub.join(sampler := Watcher("one", {}))
    await commander.send(pb.PublishWeightsRequest)
    await asyncio.to_thread(wait_for, (commander.version / layout.WEIGHTS_FILE).exists)
    await trainer.publisher.settled(trainer.run.run_id)
    size = sum(path.stat().st_size for path in trainer.publisher.find(trainer.run, 1).iterdir())
    assert checks == [size] * 3
    assert announced(sampler) == [(1, 1), (1, 1)]  # when it was staged, and when it was on the volume


@pytest.mark.asyncio(loop_scope="module")
async def test_a_volume_that_fails_is_asked_to_take_one_version_at_a_time_until_it_takes_one(
    trainer, commander, monkeypatch
):
    tried, at_once, copying = [], [], threading.Lock()

    def failing(source, _):
        tried.append(source.parent.name)
        if not copying.acquire(blocking=False):
            at_once.append(source.parent.name)
            unreadable()
        threading.Event().wait(0.02)  # for another copy to come at the same time
        copying.release()
        unreadable()

    async def take_turns():
        """Wait until each version is tried in its turn, and see that then none is tried beside another."""
        await asyncio.to_thread(wait_for, lambda: "32132" in "".join(tried))
        tried.clear()
        at_once.clear()
        await asyncio.to_thread(wait_for, lambda: len(tried) >= 6)
        assert "".join(tried[:6]) in "321321321"
        assert not at_once

    monkeypatch.setattr("trainer_service.publish.volume_copies.COPY_AGAIN_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.publish.volume_copies.shutil.copy2", failing)
        for _ in range(3):
            await commander.send(pb.PublishWeightsRequest)
        await take_turns()
        await trainer.restart()
        tried.clear()
        for version in (1, 2, 3):
            await trainer.publisher.recreate(trainer.run, version, version, "")
        await take_turns()
    versions = commander.version.parent
    await asyncio.to_thread(wait_for, lambda: sorted(layout.numbered(versions)) == [1, 2, 3])


@pytest.mark.asyncio(loop_scope="module")
async def test_who_needs_the_volume_is_refused_at_the_first_version_that_it_does_not_take(
    trainer, commander, monkeypatch
):
    tried = []

    def failing(source, _):
        tried.append(source.parent.name)
        unreadable()

    monkeypatch.setattr("trainer_service.publish.volume_copies.COPY_AGAIN_SECONDS", 3600.0)
    monkeypatch.setattr("trainer_service.publish.volume_copies.shutil.copy2", failing)
    for _ in range(3):
        await commander.send(pb.PublishWeightsRequest)
    await trainer.copies_failed(3)
    tried.clear()
    with pytest.raises(OSError, match="Input/output error"):
        await trainer.publisher.settled(trainer.run.run_id)
    assert len(tried) == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", ["settled", "recreated"])
async def test_no_copy_is_made_again_that_would_use_what_must_stay_free(trainer, commander, monkeypatch, how):
    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.publish.volume_copies.shutil.copy2", unreadable)
        for _ in range(2):
            await commander.send(pb.PublishWeightsRequest)
        await trainer.copies_failed(2)
    size = sum(path.stat().st_size for path in trainer.publisher.find(trainer.run, 1).iterdir())
    free_bytes = size + size // 2  # for one of them
    if how == "recreated":
        await trainer.restart()

    def usage(_):
        return SimpleNamespace(free=free_bytes - size * len(layout.numbered(commander.version.parent)))

    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.limits.disk_guard.shutil.disk_usage", usage)
        if how == "recreated":
            for version in (1, 2):
                await trainer.publisher.recreate(trainer.run, version, version, "")
        with pytest.raises(errors.DiskFull):
            await trainer.publisher.settled(trainer.run.run_id)
        assert len(layout.numbered(commander.version.parent)) == 1
    await trainer.publisher.settled(trainer.run.run_id)
    assert sorted(layout.numbered(commander.version.parent)) == [1, 2]


class CopiesInHand:
    """Two copies of a trainer: that of version 2 goes on when told, that of version 1 fails and starts again so."""

    def __init__(self, trainer, monkeypatch):
        self.trainer, self.monkeypatch = trainer, monkeypatch
        self.go_on = {"1": threading.Event(), "2": threading.Event()}
        self.fail, self.is_full, self.refused = threading.Event(), False, 0
        self.has_failed = self.has_started_again = False

    async def publish(self, commander):
        """Publish both, until version 1 waits for space and version 2 is being copied."""
        self.monkeypatch.setattr("trainer_service.publish.volume_copies.COPY_AGAIN_SECONDS", 0.01)
        self.monkeypatch.setattr("trainer_service.publish.volume_copies.shutil.copy2", self.copy)
        for _ in range(2):
            await commander.send(pb.PublishWeightsRequest)
        self.monkeypatch.setattr(self.trainer.guard, "check_free", self.check_free)
        self.is_full = True
        self.fail.set()
        await asyncio.to_thread(wait_for, lambda: self.refused)

    async def start_again(self):
        """Free space for version 1; return when its copy has started again."""
        self.is_full = False
        await asyncio.to_thread(wait_for, lambda: self.has_started_again)

    def check_free(self, *_):
        if self.is_full:
            self.refused += 1
            refuse_space()

    def copy(self, source, target):
        version = source.parent.name
        if version == "1" and not self.has_failed:
            self.fail.wait(PATIENCE)
            self.has_failed = True
            unreadable()
        self.has_started_again |= version == "1"
        self.go_on[version].wait(PATIENCE)
        return COPY(source, target)

    def end(self):
        """Let whatever still waits go on."""
        for event in (self.fail, *self.go_on.values()):
            event.set()


@pytest_asyncio.fixture(loop_scope="module")
async def copies_in_hand(trainer, monkeypatch):
    copies = CopiesInHand(trainer, monkeypatch)
    yield copies
    copies.end()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", ["settled", "forgotten"])
async def test_a_copy_that_started_again_meanwhile_is_waited_for_too(trainer, commander, copies_in_hand, how):
    await trainer.hub.join(sampler := Watcher("one", {}))
    await copies_in_hand.publish(commander)
    publisher, run = trainer.publisher, trainer.run
    waiting = asyncio.create_task(publisher.settled(run.run_id) if how == "settled" else publisher.forget(run))
    await asyncio.sleep(0)  # it begins
    await copies_in_hand.start_again()
    copies_in_hand.go_on["2"].set()
    assert not (await asyncio.wait({waiting}, timeout=1))[0]
    copies_in_hand.go_on["1"].set()
    await waiting
    assert commander.version.exists()
    while how == "forgotten" and not sampler.outbox.empty():
        last = sampler.outbox.get_nowait()
    assert how == "settled" or last.WhichOneof("message") == "run_deleted"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("keep_versions", "superseded"), [(KEPT_VERSIONS, False), (1, True)])
async def test_a_version_whose_name_was_not_synced_is_synced_again_or_superseded(
    trainer, commander, monkeypatch, superseded
):
    sync, fails, synced = layout.sync_directory, [True], []

    def sync_directory(directory):
        if directory == commander.version.parent and commander.version.exists():
            if fails:
                fails.clear()
                unreadable()
            synced.append(directory)
        sync(directory)

    monkeypatch.setattr("trainer_service.publish.volume_copies.layout.sync_directory", sync_directory)
    await commander.send(pb.PublishWeightsRequest)
    await trainer.copies_failed(1)
    assert (commander.version.exists(), synced) == (True, [])
    if superseded:
        await commander.send(pb.PublishWeightsRequest, durable=True)
    await trainer.publisher.settled(trainer.run.run_id)
    assert synced
    assert commander.version.exists() is not superseded


@pytest.fixture
def synced(monkeypatch):
    """The folders that are synced from now on."""
    sync, synced = layout.sync_directory, []

    def sync_directory(directory):
        sync(directory)
        synced.append(directory)

    monkeypatch.setattr(layout, "sync_directory", sync_directory)
    return synced


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("durable", [False, True])
async def test_a_version_that_a_killed_trainer_copied_is_synced_before_anything_relies_on_it(
    trainer, commander, synced, durable
):
    versions = commander.version.parent
    await commander.send(pb.PublishWeightsRequest)
    await trainer.publisher.settled(trainer.run.run_id)
    await trainer.restart()
    synced.clear()  # the kill came before that
    if durable:  # its publish was not answered, and executes again
        await publish_again(trainer.publisher, trainer.run)
    else:
        await trainer.publisher.recreate(trainer.run, 1, 1, "")
        await trainer.publisher.settled(trainer.run.run_id)
    assert versions in synced
    assert layout.numbered(versions) == [1]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("why", ["the volume fails", "no sampler takes it"])
async def test_a_publish_that_is_refused_is_recorded_with_the_version_that_it_made(
    trainer, commander, monkeypatch, why
):
    silent = Watcher("silent", {})
    await trainer.hub.join(silent)
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2", errno.EIO):
        if why == "the volume fails":
            with pytest.raises(errors.Internal):
                await commander.send(pb.PublishWeightsRequest, durable=True)
        else:
            with pytest.raises(errors.AckTimeout):
                await commander.send(pb.PublishWeightsRequest, wait_for=AckPolicy.ALL.value, ack_timeout_ms=20)
    ((version, _),) = announced(silent)
    record = trainer.run.sequencer.answers.get(commander.seq_id)
    made = trainer.publisher.staged_manifest(trainer.publisher.find(trainer.run, version))
    assert (record.version, record.version_blake3) == (version, made.model.blake3)
    await trainer.publisher.settled(trainer.run.run_id)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_killed_trainer_kept_for_a_load_is_synced_before_the_load_is_answered(trainer, commander, synced):
    run = trainer.run
    path = (await commander.send(pb.SaveCheckpointRequest, name="a", kind=CheckpointKind.STATE.value)).checkpoint.path
    await commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
    synced.clear()  # the kill came before that, and before the answer
    request = pb.LoadCheckpointRequest(run_id=run.run_id, seq_id=commander.seq_id, path=path, with_optimizer=True)
    await trainer.executor.execute(run, Command.of(request, TEAM), CommandProgress())
    assert commander.version.parents[1] / "loads" in synced


@pytest.mark.asyncio(loop_scope="module")
async def test_a_copy_that_is_cancelled_is_not_taken_for_made(trainer, commander, slow):
    publisher, run_id = trainer.publisher, trainer.run.run_id
    await trainer.hub.join(slow)
    await commander.send(pb.PublishWeightsRequest)
    settling = asyncio.create_task(publisher.settled(run_id))
    await asyncio.wait({settling}, timeout=0.5)
    settling.cancel()
    slow.go_on()
    await asyncio.gather(settling, return_exceptions=True)
    await publisher.settled(run_id)
    assert commander.version.exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sampler_that_needs_the_volume_is_told_the_newest_version_there(trainer, commander, monkeypatch):
    run = trainer.run
    await commander.send(pb.PublishWeightsRequest, durable=True)
    await commander.send(pb.PublishWeightsRequest, durable=True)
    with (
        full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"),
        pytest.raises(errors.DiskFull),
    ):
        await commander.send(pb.PublishWeightsRequest, durable=True)
    for _ in range(2):  # while the trainer lives, and after a crash while it restores version 3
        late = Watcher("late", {(run.run_id, 1): ""}, {run.run_id: 1}, needs_volume=True)
        await trainer.hub.join(late)
        message = late.outbox.get_nowait().announcement
        assert (message.manifest.model.version, message.newest_version) == (2, 3)
        assert message.volume_path
        assert late.outbox.empty()
        await trainer.hub.leave(late)
        await trainer.restart()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_version_that_is_being_copied_counts_towards_its_tenants_bytes(trainer, commander, slow):
    size = trainer.run.state_bytes(CheckpointKind.SAMPLER)
    guard = trainer.guard
    guard.count_all()
    before = guard.used(TEAM)
    guard.limit = before + size + size // 2
    await trainer.hub.join(slow)
    await commander.send(pb.PublishWeightsRequest)
    with pytest.raises(errors.QuotaExceeded):
        await commander.send(pb.PublishWeightsRequest)
    slow.go_on()
    await trainer.publisher.settled(trainer.run.run_id)
    assert guard.used(TEAM) - before == sum(path.stat().st_size for path in commander.version.iterdir())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_whole_model_is_found_again_although_a_crash_cut_off_its_comparison(trainer, commander, monkeypatch):
    run = await trainer.create_run("whole", FullParameters())

    made = (await publish_again(trainer.publisher, run)).model
    with monkeypatch.context() as patch:  # the crash comes before what was compared is removed
        patch.setattr("trainer_service.publish.publisher.shutil.rmtree", lambda *_, **__: None)
        await publish_again(trainer.publisher, run)
    assert layout.numbered(commander.version.parents[2] / run.run_id / "versions") == [1]
    assert (await publish_again(trainer.publisher, run)).model == made


@pytest.mark.asyncio(loop_scope="module")
async def test_a_whole_model_that_comes_back_different_never_gets_its_name(trainer, commander, monkeypatch):
    run = await trainer.create_run("whole_again", FullParameters())
    version = commander.version.parents[2] / run.run_id / "versions" / "1"
    with monkeypatch.context() as patch:  # what a crash would leave
        patch.setattr("trainer_service.publish.publisher.shutil.rmtree", lambda *_, **__: None)
        await trainer.publisher.recreate(run, 1, 1, "the checksum of other weights")
    assert not version.exists()
    await trainer.publisher.recreate(run, 1, 1, "")
    assert version.exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_run_that_is_deleted_while_its_version_is_copied_is_not_announced_again(trainer, commander, slow):
    await trainer.hub.join(slow)
    await commander.send(pb.PublishWeightsRequest)
    deleting = asyncio.create_task(trainer.lifecycle.delete_run(trainer.run, delete_checkpoints=False))
    assert not (await asyncio.wait({deleting}, timeout=0.5))[0]
    slow.go_on()
    await deleting
    assert trainer.hub.newest(trainer.run.run_id) == 0
    assert not commander.version.exists()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("number", "refusal", "says"),
    [(errno.ENOSPC, errors.DiskFull, "full"), (errno.EPERM, errors.Internal, "Operation not permitted")],
)
async def test_a_load_is_refused_as_long_as_the_volume_does_not_take_what_was_published_before(
    trainer, commander, monkeypatch, number, refusal, says
):
    kind = CheckpointKind.STATE.value
    path = (await commander.send(pb.SaveCheckpointRequest, name="before", kind=kind)).checkpoint.path
    await commander.send(pb.ForwardBackwardRequest, data=[codec.datum_to_proto(DATUM)], loss_fn="cross_entropy")
    stepped = await commander.send(pb.OptimStepRequest, adamw=ADAM)
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2", number):
        await commander.send(pb.PublishWeightsRequest)
        with pytest.raises(refusal, match=says):
            await commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
    assert (trainer.run.step, commander.version.exists()) == (stepped.step, False)
    loads = commander.version.parents[1] / "loads"
    assert not list(loads.iterdir()), "its tenant would be charged for it"
    await commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
    assert (trainer.run.step, commander.version.exists()) == (0, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_load_is_replayed_although_the_volume_does_not_take_what_was_published_after_it(
    trainer, commander, monkeypatch
):
    kind = CheckpointKind.STATE.value
    path = (await commander.send(pb.SaveCheckpointRequest, name="before", kind=kind)).checkpoint.path
    await commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"):
        await commander.send(pb.PublishWeightsRequest)
        await trainer.copies_failed(1)
        trainer.run.sequencer.pause()
        await trainer.recover()
        await commander.train()
    assert trainer.publisher.find(trainer.run, 1)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_what_a_command_has_done_stands_where_the_runs_file_cannot_be_written(
    trainer, commander, monkeypatch, number
):
    kind = CheckpointKind.STATE.value
    with full_disk(monkeypatch, "trainer_service.runs.registry.write_run_file", number):
        path = (await commander.send(pb.SaveCheckpointRequest, name="before", kind=kind)).checkpoint.path
        await commander.send(pb.ForwardBackwardRequest, data=[codec.datum_to_proto(DATUM)], loss_fn="cross_entropy")
        await commander.send(pb.OptimStepRequest, adamw=ADAM)
        assert trainer.run.step == 1
        await commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
        assert trainer.run.step == 0


async def publish(publisher, run, policy=AckPolicy.NONE):
    """Publish a run's first version as its first command, durably; return the reply."""
    published = await publisher.publish(run, seq_id=1, durable=True, size=0, progress=CommandProgress())
    return await publisher.confirm(published, durable=True, policy=policy, ack_seconds=60)


def publish_again(publisher, run):
    """Publish a run's first version as after a crash that kept the answer from the journal."""
    run.next_version = 1
    return publish(publisher, run)


def seal_others(directory, draft, seal=weights.seal):
    """Seal a version as if it had other bytes."""
    manifest = seal(directory, draft)
    manifest.model.blake3 = "0" * len(manifest.model.blake3)
    return manifest


def refuse_space(*_):
    raise errors.DiskFull("the volume is full")


@pytest.mark.asyncio(loop_scope="module")
async def test_versions_that_come_back_with_their_run_are_not_denied_meanwhile(trainer, commander):
    await commander.send(pb.PublishWeightsRequest, durable=True)
    await trainer.restart()
    with pytest.raises(errors.EngineUnavailable):
        trainer.publisher.find(trainer.run, 2)
    trainer.publisher.all_returned(trainer.run)
    with pytest.raises(errors.VersionNotFound):
        trainer.publisher.find(trainer.run, 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_does_not_come_back_is_denied_at_once(trainer, commander):
    await trainer.restart()
    with pytest.raises(errors.VersionNotFound, match=r"no version yet; publish its weights \(publish_weights\) first"):
        trainer.publisher.find(trainer.run, None)
    await trainer.recover()
    for _ in range(KEPT_VERSIONS + 1):
        await commander.send(pb.PublishWeightsRequest, durable=True)
    await trainer.publisher.settled(trainer.run.run_id)
    await trainer.restart()
    with pytest.raises(errors.VersionNotFound, match=r"no version 1, or no longer kept; 9 is the newest; get_run"):
        trainer.publisher.find(trainer.run, 1)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("is_removed", [True, False])
async def test_a_version_that_could_not_be_read_comes_back_when_its_run_is_restored_again(
    trainer, commander, monkeypatch, is_removed
):
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"), pytest.raises(errors.DiskFull):
        await commander.send(pb.PublishWeightsRequest, durable=True)
    await trainer.restart()
    run, publisher = trainer.run, trainer.publisher
    with monkeypatch.context() as patch:
        patch.setattr("trainer_service.publish.publisher.weights.seal", unreadable)
        if not is_removed:  # as with too many open files, which keeps a folder from being listed too
            patch.setattr("trainer_service.publish.publisher.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(OSError, match="Input/output error"):
            await publisher.recreate(run, 1, 1, "")
    assert trainer.staged() == ([] if is_removed else [1])
    await publisher.recreate(run, 1, 1, "")
    publisher.all_returned(run)
    assert publisher.find(run, 1)
    await publisher.settled(run.run_id)
    assert (commander.version / layout.WEIGHTS_FILE).exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_version_that_comes_back_is_not_denied_meanwhile_although_a_newer_one_is_on_the_volume(
    trainer, commander, monkeypatch
):
    await restart_with_the_second_of_two_on_the_volume(trainer, commander, monkeypatch)
    with pytest.raises(errors.EngineUnavailable):
        trainer.publisher.find(trainer.run, 1)
    await trainer.publisher.recreate(trainer.run, 1, 1, "")
    assert trainer.publisher.find(trainer.run, 1)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("comes_back", [True, False])
async def test_samplers_are_not_sent_back_to_an_older_version_while_the_newest_comes_back(
    trainer, commander, monkeypatch, comes_back
):
    await commander.send(pb.PublishWeightsRequest, durable=True)
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"):
        for _ in range(2):
            with pytest.raises(errors.DiskFull):
                await commander.send(pb.PublishWeightsRequest, durable=True)
    await trainer.restart()
    sampler = Watcher("sampler", {(trainer.run.run_id, 3): ""})
    await trainer.hub.join(sampler)
    await trainer.publisher.recreate(trainer.run, 2, 2, "")
    await trainer.publisher.settled(trainer.run.run_id)
    assert announced(sampler) == [(2, 3)]  # it has reached the volume, and is not the newest
    if comes_back:
        await trainer.publisher.recreate(trainer.run, 3, 3, "")
    trainer.publisher.all_returned(trainer.run)
    assert announced(sampler) == [(3, 3) if comes_back else (2, 2)]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_older_version_that_reaches_the_volume_late_is_not_announced_as_the_newest(
    trainer, commander, monkeypatch
):
    await restart_with_the_second_of_two_on_the_volume(trainer, commander, monkeypatch)
    sampler = Watcher("sampler", {})
    await trainer.hub.join(sampler)
    await trainer.publisher.recreate(trainer.run, 1, 1, "")
    trainer.publisher.all_returned(trainer.run)
    await trainer.publisher.settled(trainer.run.run_id)
    assert announced(sampler) == [(2, 2), (1, 2)]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_version_that_the_volume_has_no_space_for_is_announced_if_the_newest_does_not_come_back(
    trainer, commander, monkeypatch
):
    sampler = Watcher("sampler", {})
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"):
        for _ in range(2):
            with pytest.raises(errors.DiskFull):
                await commander.send(pb.PublishWeightsRequest, durable=True)
        await trainer.restart()
        await trainer.hub.join(sampler)
        await trainer.publisher.recreate(trainer.run, 1, 1, "")
        await trainer.publisher.recreate(trainer.run, 2, 2, "the checksum of other weights")
        trainer.publisher.all_returned(trainer.run)
    assert announced(sampler) == [(1, 1)]
    assert trainer.run.latest_version == 1
    assert trainer.publisher.find(trainer.run, None) == trainer.publisher.find(trainer.run, 1)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("differs", [False, True])
async def test_a_version_whose_publish_was_refused_comes_back_with_the_same_bytes_or_not_at_all(
    trainer, commander, monkeypatch, differs
):
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"), pytest.raises(errors.DiskFull):
        await commander.send(pb.PublishWeightsRequest, durable=True)
    await trainer.restart()
    sampler = Watcher("sampler", {})
    await trainer.hub.join(sampler)
    if differs:  # as where arithmetic is not deterministic
        monkeypatch.setattr("trainer_service.publish.publisher.weights.seal", seal_others)
    await trainer.recover()
    await trainer.publisher.settled(trainer.run.run_id)
    assert announced(sampler)[:1] == ([] if differs else [(1, 1)])
    assert commander.version.exists() is not differs


@pytest.mark.asyncio(loop_scope="module")
async def test_a_damaged_version_that_cannot_be_set_aside_keeps_nothing_from_starting(trainer, commander, monkeypatch):
    def unwritable(_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for _ in range(2):
        await commander.send(pb.PublishWeightsRequest, durable=True)
    (commander.version.parent / "2" / layout.MANIFEST_FILE).write_bytes(b"damaged")
    monkeypatch.setattr("trainer_service.publish.publisher.layout.quarantine", unwritable)
    await trainer.restart()
    await trainer.recover()
    sampler = Watcher("sampler", {})
    await trainer.hub.join(sampler)
    assert announced(sampler) == [(1, 1)]
    trainer.run.next_version = 2
    assert (await commander.send(pb.PublishWeightsRequest)).model.version == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_recovery_brings_versions_back_and_ends_with_the_newest(trainer, commander, monkeypatch):
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"):
        for _ in range(2):
            with pytest.raises(errors.DiskFull):
                await commander.send(pb.PublishWeightsRequest, durable=True)
    await commander.train()
    await trainer.restart()
    sampler = Watcher("sampler", {})
    await trainer.hub.join(sampler)
    await trainer.recover()
    await commander.train()  # an answer that comes after those of all commands before the crash
    await trainer.publisher.settled(trainer.run.run_id)
    assert {(2, 2)} <= set(announced(sampler)) <= {(1, 2), (2, 2)}  # the copy of version 1 may end last
    assert trainer.publisher.find(trainer.run, 1)
    with pytest.raises(errors.VersionNotFound):
        trainer.publisher.find(trainer.run, 3)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_publish_that_executes_again_is_announced_as_the_newest_that_it_is(trainer, commander):
    silent = Watcher("silent", {})
    await trainer.hub.join(silent)
    first = asyncio.create_task(publish(trainer.publisher, trainer.run, AckPolicy.ALL))
    while not commander.version.exists():  # noqa: ASYNC110 - nothing says when it is copied
        await asyncio.sleep(0.01)
    first.cancel()
    await trainer.restart()
    await trainer.hub.join(silent)
    announced(silent)
    trainer.run.next_version = 1
    again = asyncio.create_task(publish(trainer.publisher, trainer.run, AckPolicy.ALL))
    while not (messages := announced(silent)):  # noqa: ASYNC110 - a watcher's messages are taken without waiting
        await asyncio.sleep(0.01)
    assert set(messages) == {(1, 1)}
    blake3 = weights.read_manifest(commander.version).model.blake3
    await trainer.hub.acknowledge(silent, wpb.Acknowledgement(run_id=trainer.run.run_id, version=1, blake3=blake3))
    assert [ack.version for ack in (await again).acknowledgements] == [1]


async def acknowledge(trainer, watcher):
    """Acknowledge the next version that is announced to a watcher."""
    model = (await watcher.outbox.get()).announcement.manifest.model
    await trainer.hub.acknowledge(
        watcher, wpb.Acknowledgement(run_id=model.run_id, version=model.version, blake3=model.blake3)
    )


def announced(watcher):
    """Take from a watcher's messages the numbers of the announced versions, each with that of the newest."""
    announcements = [watcher.outbox.get_nowait().announcement for _ in range(watcher.outbox.qsize())]
    return [(one.manifest.model.version, one.newest_version) for one in announcements]


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_command_made_before_a_crash_is_not_refused_when_it_executes_again_on_a_full_disk(
    trainer, monkeypatch
):
    async def execute(request):
        return (await trainer.executor.execute(trainer.run, Command.of(request, TEAM), CommandProgress())).answer

    saving = {"run_id": trainer.run.run_id, "name": "made", "kind": CheckpointKind.STATE.value, "overwrite": True}
    made = await execute(pb.SaveCheckpointRequest(seq_id=7, **saving))
    publishing = pb.PublishWeightsRequest(run_id=trainer.run.run_id, seq_id=8, durable=True)
    version = (await execute(publishing)).model.version
    await trainer.restart()
    trainer.run.next_version = version
    monkeypatch.setattr(trainer.guard, "check_free", refuse_space)
    assert await execute(pb.SaveCheckpointRequest(seq_id=7, **saving)) == made
    assert (await execute(publishing)).model.version == version
    with pytest.raises(errors.DiskFull):
        await execute(pb.SaveCheckpointRequest(seq_id=9, **saving))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", ["full disk", "poisoned", "unreadable"])
async def test_a_version_whose_publish_is_refused_when_it_executes_again_is_the_number_of_no_other(
    trainer, commander, monkeypatch, how
):
    publishing = Command.of(pb.PublishWeightsRequest(run_id=trainer.run.run_id, seq_id=1), TEAM)
    with full_disk(monkeypatch, "trainer_service.publish.volume_copies.shutil.copy2"):
        answer = (await trainer.executor.execute(trainer.run, publishing, CommandProgress())).answer
        await trainer.restart()
    await trainer.recover()
    if how == "poisoned":
        trainer.run.sequencer.attempts[1] = 99
        with pytest.raises(errors.PoisonedCommand):
            await commander.send(pb.PublishWeightsRequest)
    elif how == "unreadable":
        with monkeypatch.context() as patch:
            patch.setattr(layout.Volume, "version", unreadable)
            with pytest.raises(errors.Internal):
                await commander.send(pb.PublishWeightsRequest)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.guard, "check_free", refuse_space)
            with pytest.raises(errors.DiskFull):
                await commander.send(pb.PublishWeightsRequest)
    assert not commander.version.exists(), "samplers alone have seen it"
    assert (await commander.send(pb.PublishWeightsRequest)).model.version == answer.model.version + 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_number_is_used_only_once_it_is_durably_reserved(trainer, commander, monkeypatch):
    with full_disk(monkeypatch, "trainer_service.runs.registry.write_run_file"):
        for _ in range(2):
            with pytest.raises(errors.DiskFull):
                await commander.send(pb.PublishWeightsRequest)
    version = (await commander.send(pb.PublishWeightsRequest)).model.version
    content = read_run_file(commander.snapshot.parents[1])
    assert version == 3 <= content["version_limit"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("damage", ["a bit", "a file"])
async def test_a_checkpoint_that_was_kept_for_a_replay_is_verified_when_it_is_loaded_again(trainer, commander, damage):
    kind = CheckpointKind.STATE.value
    path = (await commander.send(pb.SaveCheckpointRequest, name="before", kind=kind)).checkpoint.path
    await commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
    weights = commander.version.parent.parent / "loads" / str(commander.seq_id) / layout.WEIGHTS_FILE
    if damage == "a bit":
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        weights.unlink()
    with pytest.raises(errors.ChecksumMismatch):
        request = pb.LoadCheckpointRequest(
            run_id=trainer.run.run_id, seq_id=commander.seq_id, path=path, with_optimizer=True
        )
        await trainer.executor.execute(trainer.run, Command.of(request, TEAM), CommandProgress())
