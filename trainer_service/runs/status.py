"""What the service tells of a command, and the stream of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from paceline import errors
from paceline.types import CommandState
from trainer_service.journal.format import AnswerRecord
from trainer_service.runs.command import Answer, answer_from_record
from trainer_service.runs.pending import PendingCommand, PendingState

_REPEAT_SECONDS = 10.0
"""Longest silence of a stream: a reader that hears nothing for longer knows that the connection is dead."""


@dataclass(frozen=True, slots=True)
class CommandStatus:
    """The state of one command, as `paceline.trainer.v1.CommandStatus` has it."""

    seq_id: int
    state: CommandState
    digest: bytes = b""
    attachment: int = 0
    commands_ahead: int = 0
    executing_seconds: float = 0.0
    missing_seq_id: int = 0
    answer: Answer | None = None
    answer_expired: bool = False
    is_another: bool = False
    """Whether it is the status of another command than the caller's, which has its seq_id."""

    def of_another(self) -> CommandStatus:
        """Return the status for a caller with another command: without the answer."""
        return replace(self, answer=None, is_another=True)

    def without_reply(self) -> CommandStatus:
        """Return the status without a reply, which may be large; errors stay."""
        return self if isinstance(self.answer, errors.PacelineError) else replace(self, answer=None)


def status_of_pending(pending: PendingCommand, ahead: int, missing: int) -> CommandStatus:
    """Return the status of a command that `ahead` others precede and before which `missing` has not arrived."""
    state = pending.state
    is_executing = state is PendingState.EXECUTING
    return CommandStatus(
        pending.command.seq_id,
        state.public,
        pending.command.digest,
        pending.command.attachment,
        commands_ahead=0 if state.has_ended else ahead,
        executing_seconds=asyncio.get_running_loop().time() - pending.begun_at if is_executing else 0.0,
        missing_seq_id=missing if state is PendingState.HELD else 0,
        answer=pending.answer,
    )


def status_of_answer(seq_id: int, record: AnswerRecord | None) -> CommandStatus:
    """Return the status of a command that has ended; `record` is what is still known of its answer."""
    if record is None:
        return CommandStatus(seq_id, CommandState.UNKNOWN, answer_expired=True)
    state = CommandState.SUCCEEDED if record.failure is None else CommandState.REFUSED
    answer = answer_from_record(record)
    return CommandStatus(seq_id, state, record.digest, record.attachment, answer=answer, answer_expired=answer is None)


ToTell = CommandStatus | Callable[[], CommandStatus]
"""A status, or how to read it when it is told."""


class StatusStream:
    """The statuses of commands: those at its creation, then each change. Close it to stop watching."""

    def __init__(
        self,
        first: Mapping[int, ToTell],
        commands: Sequence[PendingCommand] = (),
        describe: Callable[[Sequence[PendingCommand]], list[CommandStatus]] = lambda _: [],
    ) -> None:
        """`first` are the present statuses by seq_id; `describe` makes those of `commands`, which may change."""
        self._first = dict(first)
        self._describe = describe
        self._watched = {pending: None for pending in commands if not pending.state.has_ended}
        self._changed: dict[PendingCommand, None] = {}
        self._event = asyncio.Event()
        for pending in self._watched:
            pending.watchers.append(self._note)

    async def change(self) -> None:
        """Wait for the next change."""
        await self._event.wait()
        self._event.clear()

    async def statuses(self, seconds: float | None = None) -> AsyncGenerator[CommandStatus]:
        """Yield the present status of each command, then changes, until all have ended or `seconds` have passed.

        Those that do not change are yielded again every few seconds. A command that changes twice before its status is
        read is yielded once. Raises why a command was left.
        """
        self._first.update((status.seq_id, status) for status in self._take())
        for seq_id in list(self._first):
            first = self._first.pop(seq_id)
            yield first if isinstance(first, CommandStatus) else first()
            del first
        clock = asyncio.get_running_loop().time
        end = None if seconds is None else clock() + seconds
        while self._watched or self._changed:
            left = _REPEAT_SECONDS if end is None else min(_REPEAT_SECONDS, end - clock())
            if left <= 0:
                return
            try:
                await asyncio.wait_for(self.change(), left)
            except TimeoutError:
                self._changed = dict(self._watched)
            for status in self._take():
                yield status

    async def last(self) -> CommandStatus:
        """Return the last status of the only command."""
        async with aclosing(self.statuses()) as statuses:
            async for status in statuses:
                found = status
        return found

    async def aclose(self) -> None:
        """Watch no longer."""
        for pending in list(self._watched):
            self._stop(pending)

    def _take(self) -> list[CommandStatus]:
        """Return the statuses of the commands that have changed."""
        changed, self._changed = list(self._changed), {}
        for pending in changed:
            if pending.state is PendingState.LEFT and pending.given_up is not None:
                raise pending.given_up.with_traceback(None)
            if pending.state.has_ended:
                self._stop(pending)
        return self._describe(changed)

    def _note(self, pending: PendingCommand) -> None:
        self._changed[pending] = None
        self._event.set()

    def _stop(self, pending: PendingCommand) -> None:
        if pending in self._watched:
            del self._watched[pending]
            pending.watchers.remove(self._note)
