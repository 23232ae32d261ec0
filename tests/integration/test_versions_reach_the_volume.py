"""A version that is published without `durable` is on the volume before anything counts on it to be there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio
from cluster import wait_for
from tiny_models import make_tiny_llama

from paceline import codec, layout
from paceline.rpc.identity import Identity
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import CheckpointKind, Datum, LoraConfig
from paceline.waiting_bytes import WaitingBytes
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.commands import Commands
from trainer_service.disk import NO_GUARD
from trainer_service.engine.options import EngineOptions
from trainer_service.engine.process import EngineProcess
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.publish.feed import Feed, Watcher
from trainer_service.publish.group import BroadcastGroup, GroupOptions
from trainer_service.publish.publisher import Publisher
from trainer_service.runs.byte_gate import ByteGate
from trainer_service.runs.command import Command
from trainer_service.runs.executor import SnapshotPolicy
from trainer_service.runs.recovery import Recovery
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.restore_point import RestorePoints
from trainer_service.runs.storage import RunStorage
from trainer_service.settings import TrainerSettings
from trainer_service.trainer import Trainer
from trainer_service.volume_bytes import VolumeBytes

TEAM = "team"
SNAPSHOT_AFTER = 4
"""Commands."""
DATUM = Datum(np.arange(4, dtype=np.int32), {"target_tokens": np.arange(4), "weights": np.ones(4, np.float32)})


class SlowCopy(Watcher):
    """Hears of a version before it is copied to the volume, and has whoever copies it wait for a file."""

    def __init__(self, publisher, run):
        super().__init__("slow copy", {})
        self.publisher, self.run = publisher, run
        self.file = -1

    def announce(self, announcement):
        if not announcement.volume_path:
            version = announcement.manifest.model.version
            self.file = os.open(self.publisher.find(self.run, version) / layout.CONFIG_FILE, os.O_RDONLY)
            fcntl.fcntl(self.file, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # who opens it now waits

    def go_on(self):
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class Commander:
    """Sends a run's commands, in order, as the service does."""

    def __init__(self, run, volume):
        self.run = run
        self.version = volume.version(run.run_id, 1)
        self.snapshot = volume.run(run.run_id) / "snapshots" / str(SNAPSHOT_AFTER)
        self.seq_id = 0

    def send(self, message, **fields):
        self.seq_id += 1
        request = message(run_id=self.run.run_id, seq_id=self.seq_id, **fields)
        return asyncio.ensure_future(self.run.sequencer.execute(Command.of(request, TEAM)))

    async def train(self):
        await self.send(
            pb.ForwardBackwardRequest, data=[codec.datum_to_proto(DATUM)], loss_fn="cross_entropy", forward_only=True
        )


@pytest.fixture(autouse=True)
def leases_are_quiet():
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # it says that somebody waits for the file
    yield
    signal.signal(signal.SIGIO, before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    async with EngineProcess(EngineOptions(str(model), "tiny")) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(engine, tmp_path):
    """The service's parts, put together in this process, but for the engine's."""
    settings = TrainerSettings(model="tiny", checkpoint_dir=tmp_path / "volume", min_free_bytes=0, insecure=True)
    volume = layout.Volume(settings.checkpoint_dir)
    storage = RunStorage(volume, settings, NO_FAILPOINTS, WaitingBytes(), NO_GUARD)
    registry, checkpoints, feed = RunRegistry(volume, storage, VolumeBytes(volume)), CheckpointStore(volume), Feed()
    group = BroadcastGroup(GroupOptions("127.0.0.1:0", "gloo", 10), feed)

    def start(run, engines_lost):
        recovery.start(run, engines_lost)

    def spawn(work):
        tasks.append(asyncio.create_task(work))

    publisher = Publisher(engine.save_adapter, registry, feed, volume, tmp_path / "staging", 8, NO_FAILPOINTS, group)
    trainer = Trainer(settings, engine, registry, checkpoints, publisher, start, NO_GUARD, VolumeBytes(volume))
    policy = SnapshotPolicy(commands=SNAPSHOT_AFTER, journal_bytes=1 << 30, seconds=1e9)
    restore_points = RestorePoints(volume, registry, checkpoints)
    tasks = []
    recovery = Recovery(
        engine,
        storage,
        publisher,
        Commands(trainer),
        policy,
        ByteGate(0),
        NO_FAILPOINTS,
        spawn,
        restore_points,
        registry,
    )
    await registry.restore()
    publisher.start()
    run = await trainer.create_run(Identity(TEAM), "request", b"digest", "", LoraConfig(rank=4, alpha=8), {})
    slow = SlowCopy(publisher, run)
    await feed.join(slow)
    yield SimpleNamespace(commander=Commander(run, volume), slow=slow)
    slow.go_on()
    await registry.close()
    await publisher.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_before_a_load_answers(trainer):
    commander = trainer.commander
    kind = CheckpointKind.STATE.value
    path = (await commander.send(pb.SaveCheckpointRequest, name="before", kind=kind)).checkpoint.path
    await commander.send(pb.PublishWeightsRequest)
    loading = commander.send(pb.LoadCheckpointRequest, path=path, with_optimizer=True)
    assert not (await asyncio.wait({loading}, timeout=1))[0]
    assert not commander.version.exists()
    trainer.slow.go_on()
    await loading
    assert (commander.version / layout.WEIGHTS_FILE).exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_before_a_snapshot_counts(trainer):
    commander = trainer.commander
    await commander.send(pb.PublishWeightsRequest)
    for _ in range(SNAPSHOT_AFTER - 1):
        await commander.train()
    appearing = asyncio.create_task(asyncio.to_thread(wait_for, commander.snapshot.exists))
    assert not (await asyncio.wait({appearing}, timeout=1))[0]
    assert any(commander.snapshot.parent.glob(".new-*/*")), "the state itself is written"
    assert not commander.version.exists()
    trainer.slow.go_on()
    await appearing
    assert (commander.version / layout.WEIGHTS_FILE).exists()
