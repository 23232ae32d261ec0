"""What becomes of a run's command."""

from __future__ import annotations

from enum import Enum


class CommandState(Enum):
    """What has become of a command. The values are those of the contract's CommandState."""

    UNKNOWN = 0
    """It ended so long ago that the trainer no longer knows how."""
    NOT_ARRIVED = 1
    """The trainer does not have it: its seq_id is free."""
    HELD = 2
    """In the trainer's memory, behind a command that has not arrived or about to be accepted."""
    ACCEPTED = 3
    """Durable: it executes once, in its place."""
    EXECUTING = 4
    SUCCEEDED = 5
    REFUSED = 6

    @property
    def is_durable(self) -> bool:
        """Whether the trainer has it on disk, or its answer: it need not be sent again."""
        durable = {CommandState.ACCEPTED, CommandState.EXECUTING, CommandState.SUCCEEDED, CommandState.REFUSED}
        return self in durable

    @property
    def has_ended(self) -> bool:
        """Whether nothing more becomes of it, unless it is sent again."""
        return self in {CommandState.UNKNOWN, CommandState.NOT_ARRIVED, CommandState.SUCCEEDED, CommandState.REFUSED}
