"""What the order of a run's commands and their execution know of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import Message

from paceline import errors
from trainer_service.journal.records import Facts
from trainer_service.runs.command import Command

REPEATABLE = frozenset({"ForwardBackward", "OptimStep"})
"""Commands whose replies come out the same when they are executed again, so that they need not be durable first."""
READING = frozenset({"SaveCheckpoint", "PublishWeights"})
"""Commands that let the next begin before they end."""


class CommandProgress:
    """A command's turn to execute.

    It is captured when the command has taken from the run's state all that it needs, so that the next may begin; then
    released, when it asks nothing more of the engine; then ended. What does not say so is captured and released when
    it ends.
    """

    def __init__(self, earlier: Sequence[CommandProgress] = (), *, may_overlap: bool = False) -> None:
        """Take the turns of commands of the same kind before it that have not ended."""
        self.captured = asyncio.Event()
        self.released = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_answered = False
        """Whether it ended with an answer, and not because it has to execute again."""
        self.version = 0
        """Number of the version that the command made; 0 for none."""
        self._earlier = tuple(earlier)
        self._may_overlap = may_overlap

    def capture(self) -> None:
        """Let the next command begin."""
        if self._may_overlap:
            self.captured.set()

    def release(self) -> None:
        """Say that what is left to do needs no engine."""
        self.released.set()

    async def wait_for_earlier(self) -> None:
        """Wait until the commands of this kind before it are answered. Raises EngineUnavailable when one is not."""
        for progress in self._earlier:
            await progress.ended.wait()
            if not progress.is_answered:
                raise errors.EngineUnavailable("a command before this one has to execute again first")

    def end(self) -> None:
        """Let go whoever waits."""
        self._earlier = ()
        for event in (self.captured, self.released, self.ended):
            event.set()


class Executor(Protocol):
    """Executes a run's commands."""

    async def execute(self, command: Command, progress: CommandProgress) -> Message:
        """Execute a command. Raises PacelineError; EngineUnavailable means that it was not executed."""
        ...

    def facts(self) -> Facts:
        """Return what is known of the run now."""
        ...

    async def executed(self, command: Command) -> None:
        """Do what must come between this command, which may still be under way, and the next."""
        ...

    async def close(self) -> None:
        """Finish what goes on behind the commands."""
        ...
