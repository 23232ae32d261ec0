"""Executes one run's commands and saves its state now and then, between two of them."""

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
from paceline.types import RunState
from trainer_service.failpoints import Failpoints
from trainer_service.journal.records import Facts
from trainer_service.runs.command import Command
from trainer_service.runs.record import RunRecord

_log = get_logger(__name__)


class CommandVerbs(Protocol):
    """What executes a command of any run."""

    async def execute(self, run: RunRecord, command: Command) -> Message:
        """Execute a command and return its reply. Raises PacelineError."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """When a run's state is saved: after as much work as a replay may take, or a journal may hold."""

    commands: int
    journal_bytes: int
    seconds: float


class RunExecutor:
    """Fulfils `Executor` for one run that is in the engine."""

    def __init__(
        self,
        run: RunRecord,
        verbs: CommandVerbs,
        save_state: Callable[[str, Path], Awaitable[None]],
        settled: Callable[[str], Awaitable[None]],
        policy: SnapshotPolicy,
        failpoints: Failpoints,
        replayed: int = 0,
    ) -> None:
        """Take `settled` to wait until the run's versions are on the volume, and how many commands were replayed."""
        self._run = run
        self._verbs = verbs
        self._save_state = save_state
        self._settled = settled
        self._policy = policy
        self._failpoints = failpoints
        self._commands = replayed
        self._bytes = run.sequencer.journal.appended_bytes
        self._seconds = 0.0
        self._snapshot: asyncio.Task[None] | None = None

    async def execute(self, command: Command) -> Message:
        start = perf_counter()
        try:
            return await self._verbs.execute(self._run, command)
        finally:
            self._seconds += perf_counter() - start

    def facts(self) -> Facts:
        return self._run.facts()

    async def executed(self, command: Command) -> None:
        self._commands += 1
        is_idle = self._snapshot is None or self._snapshot.done()
        if is_idle and self._is_due() and self._run.state is RunState.READY:
            self._failpoints.hit("before_snapshot")
            written = asyncio.Event()
            self._snapshot = asyncio.create_task(self._save(command.seq_id, written))
            await written.wait()

    async def close(self) -> None:
        if self._snapshot is not None:
            await asyncio.wait({self._snapshot})

    def _is_due(self) -> bool:
        return (
            self._commands >= self._policy.commands
            or self._run.sequencer.journal.appended_bytes - self._bytes >= self._policy.journal_bytes
            or self._seconds >= self._policy.seconds
        )

    async def _save(self, seq_id: int, written: asyncio.Event) -> None:
        """Save the run's state, and once it is durable remove what only a longer replay would need."""
        sequencer, snapshots = self._run.sequencer, self._run.snapshots
        self._commands, self._seconds, self._bytes = 0, 0.0, sequencer.journal.appended_bytes
        facts, answers = self._run.facts(), list(sequencer.answers)
        try:
            await sequencer.journal.rotate()
            await snapshots.save(seq_id, self._write, facts, answers, written)
            await self._settled(self._run.run_id)
            await asyncio.to_thread(snapshots.drop_before, seq_id)
            await sequencer.journal.drop(seq_id)
        except (errors.PacelineError, OSError) as error:
            _log.warning("snapshot not saved; the journal stays", run=self._run.run_id, error=str(error))
        finally:
            written.set()

    async def _write(self, directory: Path) -> None:
        await self._save_state(self._run.run_id, directory)
