"""The trainer's parts in this process, on a volume that they find again when they restart; only the engine is its own.

A test can make the volume or the disk fail under them, and call what the service calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline import layout
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import Identity
from paceline.types import LoraConfig, RunParameters
from support.stacks.cluster import wait_for
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.commands import CommandExecutor, SnapshotPolicy
from trainer_service.engine_link.client import EngineProcess
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.limits.disk_guard import NO_GUARD, DiskGuard
from trainer_service.limits.gates import ByteGate
from trainer_service.metrics.recorder import Recorder
from trainer_service.metrics.store import MetricsStore
from trainer_service.publish.process_group import BroadcastGroup, GroupOptions
from trainer_service.publish.publisher import Publisher
from trainer_service.publish.watch_hub import WatchHub
from trainer_service.recovery import Recovery
from trainer_service.run_lifecycle import RunLifecycle
from trainer_service.runs.record import RunRecord
from trainer_service.runs.registry import RunRegistry
from trainer_service.runs.storage import RunStorage
from trainer_service.service_metrics import TrainerMetrics
from trainer_service.settings import TrainerSettings
from trainer_service.usage import UsageLedger

TEAM = "team"
"""The tenant of the runs."""


class TrainerParts:
    """The parts of a trainer that execute commands and publish, with one run that tests look at."""

    guard: DiskGuard
    hub: WatchHub
    publisher: Publisher
    executor: CommandExecutor
    recovery: Recovery
    lifecycle: RunLifecycle
    run: RunRecord

    def __init__(self, engine: EngineProcess, directory: Path, keep_versions: int, snapshot_after: int) -> None:
        """Put the volume and the staging directory into `directory`; save a snapshot each `snapshot_after` commands."""
        self.volume = layout.Volume(directory / "volume")
        self._engine = engine
        self._staging = directory / "staging"
        self._keep_versions = keep_versions
        self._policy = SnapshotPolicy(commands=snapshot_after, journal_bytes=1 << 30, seconds=1e9)
        self._spawned: list[asyncio.Task[None]] = []
        self._logged: list[Any] = []

    async def start(self) -> None:
        """Assemble the parts on what the volume holds, and create the run if it is the first start."""
        settings = TrainerSettings(model="tiny", checkpoint_dir=self.volume.root, min_free_bytes=0, insecure=True)
        storage = RunStorage(self.volume, settings, NO_FAILPOINTS, WaitingBytes(), NO_GUARD)
        self.guard, self.hub, checkpoints = DiskGuard(volume=self.volume), WatchHub(), CheckpointStore(self.volume)
        self._registry = RunRegistry(self.volume, storage, self.guard)
        group = BroadcastGroup(GroupOptions("127.0.0.1:0", "gloo", 10), self.hub)
        self.publisher = Publisher(
            self._engine,
            self._registry,
            self.hub,
            self.volume,
            self._staging,
            self._keep_versions,
            NO_FAILPOINTS,
            group,
            self.guard,
        )
        metrics = MetricsStore(self.volume, NO_GUARD, CollectorRegistry(), 1 << 20, 1 << 20)
        recorder = Recorder(metrics)
        self.executor = CommandExecutor(settings, self._engine, self._registry, checkpoints, self.publisher, self.guard)
        self.recovery = Recovery(
            self._engine,
            storage,
            self.publisher,
            self.executor,
            self._policy,
            ByteGate(0),
            NO_FAILPOINTS,
            self._spawn,
            checkpoints,
            self._registry,
            TrainerMetrics(CollectorRegistry()),
            recorder,
            UsageLedger(self.volume.root, CollectorRegistry()),
        )
        self.lifecycle = RunLifecycle(
            64, self._engine, self._registry, checkpoints, self.publisher, self.recovery.start, recorder
        )
        await self._registry.restore()
        self.publisher.start()
        self.run = await self.create_run("request", LoraConfig(rank=4, alpha=8))

    async def stop(self) -> None:
        """Stop the parts; the engine goes on, and what was staged is gone."""
        await self._registry.close()
        await self.publisher.stop()

    async def restart(self) -> None:
        """Stop the parts and start others on the same volume. The run is there; its state is not restored."""
        await self.stop()
        await self.start()

    async def recover(self) -> None:
        """Restore the run's state, so that its commands execute, and tell the publisher that no version comes back."""
        await self.recovery.recover(self.run)
        await asyncio.gather(*self._spawned)

    async def create_run(self, request_id: str, parameters: RunParameters) -> RunRecord:
        """Create a run, or return the one that the same request created."""
        return await self.lifecycle.create_run(Identity(TEAM), request_id, b"digest", "", parameters, {})

    def staged(self) -> list[int]:
        """Return which versions of the run are in the staging directory, in order."""
        (directory,) = self._staging.iterdir()
        return sorted(layout.numbered(directory / self.run.run_id))

    async def copies_failed(self, number: int) -> None:
        """Wait until the log has said so often that the volume did not take a version."""
        await asyncio.to_thread(wait_for, lambda: self._failures() >= number)

    def _failures(self) -> int:
        return sum(line["event"] == "copying the version to the volume failed" for line in self._logged)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._spawned.append(asyncio.create_task(work))

    async def __aenter__(self) -> TrainerParts:
        self._capture = capture_logs()
        self._logged = self._capture.__enter__()
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._capture.__exit__(None, None, None)
