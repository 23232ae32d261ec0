"""Which state checkpoint of a run is the newest: read from the volume once, then known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from paceline.layout import CheckpointPath
from paceline.log import get_logger
from paceline.types import CheckpointKind

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """A state checkpoint and the seq_id of the command that made it."""

    path: str
    seq_id: int


NO_CHECKPOINT = StateCheckpoint("", -1)


class NewestStates:
    """The newest state checkpoint of each run that was asked for, in the order of its commands."""

    def __init__(self, read: Callable[[str], tuple[StateCheckpoint, bool]]) -> None:
        """`read` finds a run's newest on the volume, and tells whether all could be read; it is called in a thread."""
        self._read = read
        self._known: dict[str, StateCheckpoint] = {}
        self._changes = 0
        """Checkpoints saved and removed: one that changes while a run's are read may have been missed."""

    async def find(self, run_id: str) -> StateCheckpoint:
        """Return a run's newest state checkpoint, or NO_CHECKPOINT. Raises OSError if that cannot be read now."""
        if (known := self._known.get(run_id)) is not None:
            return known
        before = self._changes
        found, are_all_read = await asyncio.to_thread(self._read, run_id)
        if are_all_read and self._changes == before:
            self._known[run_id] = found
        return found

    async def find_if_readable(self, run_id: str) -> StateCheckpoint:
        """Return the same, but NO_CHECKPOINT if it cannot be read now: for the answer to what is done already."""
        try:
            return await self.find(run_id)
        except OSError as error:
            _log.warning("a run's newest state checkpoint cannot be read", run=run_id, error=str(error))
            return NO_CHECKPOINT

    def saved(self, path: CheckpointPath, seq_id: int) -> None:
        """Note that command `seq_id` made a checkpoint, perhaps in place of another."""
        known = self._known.get(path.run_id)
        self.removed(path)
        if known is not None and path.kind is CheckpointKind.STATE and seq_id >= known.seq_id:
            self._known[path.run_id] = StateCheckpoint(str(path), seq_id)

    def removed(self, path: CheckpointPath) -> None:
        """Note that a checkpoint is gone."""
        self._changes += 1
        known = self._known.get(path.run_id)
        if known is not None and known.path == str(path):
            del self._known[path.run_id]

    def forget(self, run_id: str) -> None:
        """Forget a run that is deleted."""
        self._known.pop(run_id, None)
