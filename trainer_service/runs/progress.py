"""How far the execution of a command has come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline import errors


class CommandProgress:
    """Progress of a command's execution.

    A command is captured when it has taken all that it needs from the run's state, so that the next one may start; then
    released, when it no longer needs the engine; then ended. A command that does not report the first two is captured
    and released when it ends.
    """

    def __init__(
        self, earlier: Sequence[CommandProgress] = (), *, may_overlap: bool = False, is_replay: bool = False
    ) -> None:
        """`earlier` are the commands of the same kind before this one that have not ended.

        With `is_replay` the command was answered before, and executes only for what it changes in the engine.
        """
        self.is_replay = is_replay
        self.captured = asyncio.Event()
        self.released = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_answered = False
        """Whether the command ended with an answer, and not because it has to execute again."""
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
                raise errors.EngineUnavailable("an earlier command has to execute again first")

    def end(self) -> None:
        """Set all events, to wake everything that waits."""
        self._earlier = ()
        for event in (self.captured, self.released, self.ended):
            event.set()
