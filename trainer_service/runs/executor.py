"""Executes one run's commands and takes snapshots of the run between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

from google.protobuf.message import Message

from paceline import errors
from paceline.log import get_logger
from paceline.types import CheckpointKind, RunState
from trainer_service.engine.client import Captured
from trainer_service.failpoints import Failpoints
from trainer_service.journal.records import AnswerRecord, Facts
from trainer_service.runs.command import Command
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.record import RunRecord

_log = get_logger(__name__)


class CommandVerbs(Protocol):
    """Executes the commands of all runs."""

    async def execute(self, run: RunRecord, command: Command, progress: CommandProgress) -> Message:
        """Execute a command and return its reply. Raises PacelineError."""
        ...


class SaveState(Protocol):
    """The engine's method that saves a run's state."""

    async def __call__(self, run_id: str, directory: Path, captured: Captured) -> None: ...


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """When to snapshot a run: after as much work as a replay may take, or as many bytes as its journal may hold."""

    commands: int
    journal_bytes: int
    seconds: float


class RunExecutor:
    """Implements `Executor` for one run in the engine."""

    def __init__(
        self,
        run: RunRecord,
        verbs: CommandVerbs,
        save_state: SaveState,
        settled: Callable[[str], Awaitable[None]],
        policy: SnapshotPolicy,
        failpoints: Failpoints,
    ) -> None:
        """`settled` waits until the versions of a run are on the volume."""
        self._run = run
        self._verbs = verbs
        self._save_state = save_state
        self._settled = settled
        self._policy = policy
        self._failpoints = failpoints
        self._commands = 0
        self._bytes = run.sequencer.journal.appended_bytes
        self._seconds = 0.0
        self._snapshot: asyncio.Task[None] | None = None

    def count(self, replayed: int) -> None:
        """Count replayed commands towards the next snapshot: the next startup would replay them too."""
        self._commands += replayed

    async def execute(self, command: Command, progress: CommandProgress) -> Message:
        start = perf_counter()
        try:
            return await self._verbs.execute(self._run, command, progress)
        finally:
            self._seconds += perf_counter() - start

    def facts(self) -> Facts:
        return self._run.facts()

    async def executed(self, command: Command) -> None:
        self._commands += 1
        is_idle = self._snapshot is None or self._snapshot.done()
        if is_idle and self._is_due() and self._run.state is RunState.READY:
            self._failpoints.hit("before_snapshot")
            captured = asyncio.Event()
            self._snapshot = asyncio.create_task(self._save(command.seq_id, captured))
            await captured.wait()

    async def close(self) -> None:
        if self._snapshot is not None:
            await asyncio.wait({self._snapshot})

    def _is_due(self) -> bool:
        return (
            self._commands >= self._policy.commands
            or self._run.sequencer.journal.appended_bytes - self._bytes >= self._policy.journal_bytes
            or self._seconds >= self._policy.seconds
        )

    async def _save(self, seq_id: int, captured: asyncio.Event) -> None:
        """Save a snapshot and, once it is durable, remove what only a longer replay would need.

        It is completed when every command up to `seq_id` is answered and every version that they published is on the
        volume: until then one of them may have to execute again.
        """
        sequencer, snapshots = self._run.sequencer, self._run.snapshots
        self._commands, self._seconds, self._bytes = 0, 0.0, sequencer.journal.appended_bytes
        place = self._run.facts()

        async def write(directory: Path) -> tuple[Facts, list[AnswerRecord]]:
            await self._save_state(self._run.run_id, directory, captured.set)
            await sequencer.answered(seq_id, self)
            await self._settled(self._run.run_id)
            return self._run.facts().at(place), [answer for answer in sequencer.answers if answer.seq_id <= seq_id]

        try:
            await sequencer.journal.rotate()
            await snapshots.save(seq_id, self._run.state_bytes(CheckpointKind.STATE), write)
            await sequencer.journal.drop(await asyncio.to_thread(snapshots.drop_old))
        except (errors.PacelineError, OSError) as error:
            _log.warning("snapshot not saved; the journal stays", run=self._run.run_id, error=str(error))
        finally:
            captured.set()
