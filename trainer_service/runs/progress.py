"""Interface between the ordering of a run's commands and their execution."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import Message

from paceline import errors
from trainer_service.journal.records import Facts
from trainer_service.runs.command import Command

REPEATABLE = frozenset({"ForwardBackward", "OptimStep"})
"""Commands that reply the same when executed again, so their replies need not be durable before they are sent."""
READING = frozenset({"SaveCheckpoint", "PublishWeights"})
"""Commands that let the next one start before they end."""


class CommandProgress:
    """Progress of a command's execution.

    A command is captured when it has taken all that it needs from the run's state, so that the next one may start; then
    released, when it no longer needs the engine; then ended. A command that does not report the first two is captured
    and released when it ends.
    """

    def __init__(self, earlier: Sequence[CommandProgress] = (), *, may_overlap: bool = False) -> None:
        """`earlier` are the commands of the same kind before this one that have not ended."""
        self.captured = asyncio.Event()
        self.released = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_answered = False
        """Whether the command ended with an answer, and not because it has to execute again."""
        self.version = 0
        """Number of the version that the command made; 0 for none."""
        self._earlier = tuple(earlier)
        self._may_overlap = may_overlap

    def capture(self) -> None:
        """Let the next command start, if this one may overlap with it."""
        if self._may_overlap:
            self.captured.set()

    def release(self) -> None:
        """Report that the rest of the command does not need the engine."""
        self.released.set()

    async def wait_for_earlier(self) -> None:
        """Wait until earlier commands of this kind are answered. Raises EngineUnavailable if one must execute again."""
        for progress in self._earlier:
            await progress.ended.wait()
            if not progress.is_answered:
                raise errors.EngineUnavailable("a command before this one has to execute again first")

    def end(self) -> None:
        """Set all events, to wake everything that waits."""
        self._earlier = ()
        for event in (self.captured, self.released, self.ended):
            event.set()


class Executor(Protocol):
    """Executes a run's commands."""

    async def execute(self, command: Command, progress: CommandProgress) -> Message:
        """Execute a command. Raises PacelineError; EngineUnavailable means that it was not executed."""
        ...

    def facts(self) -> Facts:
        """Return the run's current facts."""
        ...

    async def executed(self, command: Command) -> None:
        """Do what must happen between this command, which may still be executing, and the next."""
        ...

    async def close(self) -> None:
        """Finish the work that continues in the background."""
        ...
