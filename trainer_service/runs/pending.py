"""The commands of a run that have not ended, and the states that each passes through.

                    ┌──────────► NOT_ARRIVED ◄────────┐
                    │ gap, superseded                 │ the journal has no room
    arrives ──► HELD behind a gap ──► HELD, being written ──► ACCEPTED ◄──► EXECUTING ──► SUCCEEDED
                                              │ refused input    │ cancelled      │
                                              └─────────────► REFUSED ◄───────────┘

A refused command keeps its place until its turn, although its caller has the answer: what follows must not overtake it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from paceline import errors
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.types import CommandState
from trainer_service.journal.format import CancelRecord, Facts, RebaseRecord
from trainer_service.journal.journal import RunJournal
from trainer_service.runs.command import Answer, Command
from trainer_service.runs.progress import CommandProgress

MAX_OUTSTANDING = 1024
"""Most commands of a run that may have arrived and not ended."""
READING = frozenset({"SaveCheckpoint", "PublishWeights"})
"""Commands that let the next one start before they end."""

_RETRY_SECONDS = 1.0
_MOVES = {
    CommandState.HELD: {CommandState.ACCEPTED, CommandState.REFUSED, CommandState.NOT_ARRIVED},
    CommandState.ACCEPTED: {CommandState.EXECUTING, CommandState.REFUSED},
    CommandState.EXECUTING: {CommandState.ACCEPTED, CommandState.SUCCEEDED, CommandState.REFUSED},
}
"""The states to which a command may go from each."""


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command that has not ended, or was refused and waits for its turn. `move` alone changes its state."""

    command: Command
    state: CommandState = CommandState.HELD
    answer: Answer | None = None
    """What it answered, or why it is not accepted; None while neither is known."""
    durable: asyncio.Future[None] | None = None
    """Set when the command is appended to the journal; done when it is durable."""
    progress: CommandProgress | None = None
    """Set while the command executes."""
    place: Facts | None = None
    """Facts after the command in the run's order; set if it was captured before it ended."""
    may_have_begun: bool = False
    """Whether it may have made something that others can see, in this process or before a restart."""
    begun_at: float = 0.0
    """The loop's time when it began to execute."""
    left: errors.PacelineError | None = None
    """Why the service no longer tells what becomes of it: it stops, or the run is gone."""
    timeout: asyncio.TimerHandle | None = None
    """Set while earlier commands are missing."""
    watchers: list[Callable[[PendingCommand], None]] = field(default_factory=list)
    """Called after each change of `state` or `left`."""

    @property
    def withdrawal(self) -> errors.PacelineError | None:
        """Why the command was not accepted; None if it was, or may yet be."""
        is_withdrawn = self.state is CommandState.NOT_ARRIVED
        return self.answer if is_withdrawn and isinstance(self.answer, errors.PacelineError) else None

    def move(self, state: CommandState, answer: Answer | None = None) -> None:
        """Change the state and tell the watchers; `answer` belongs to the states that have one."""
        if state not in _MOVES.get(self.state, ()):
            raise AssertionError(f"command {self.command.seq_id} cannot go from {self.state.name} to {state.name}")
        self.state, self.answer = state, answer
        self._tell()

    def leave(self, error: errors.PacelineError) -> None:
        """Tell the watchers that this process will not end the command."""
        if not self.state.has_ended:
            self.left = error
            self._tell()

    def cancel_timeout(self) -> None:
        """Cancel the timeout: no earlier command is missing, or this one is gone; the timer would keep it in memory."""
        if self.timeout is not None:
            self.timeout.cancel()
            self.timeout = None

    def _tell(self) -> None:
        for watcher in list(self.watchers):
            watcher(self)


class PendingCommands:
    """A run's commands that have not ended; each is journaled once all commands before it have arrived."""

    def __init__(
        self, journal: RunJournal, last_seq_id: int, gap_wait_seconds: float, tenant: str, waiting_bytes: WaitingBytes
    ) -> None:
        """Accept commands after `last_seq_id`, which is in the journal; count bytes of waiting ones as `tenant`'s."""
        self.by_seq_id: dict[int, PendingCommand] = {}
        self.appended = self._answered = last_seq_id
        """Highest seq_id that was appended to the journal."""
        self._journal = journal
        self._gap_wait = gap_wait_seconds
        self._tenant = tenant
        self._bytes = waiting_bytes
        journal.on_refused = self._withdraw

    def restore(self, command: Command) -> None:
        """Add a command from the journal."""
        pending = self._add(command)
        pending.durable = asyncio.get_running_loop().create_future()
        pending.durable.set_result(None)
        # A save or a publish may have been seen before the trainer ended.
        pending.may_have_begun = command.method in READING
        self.settle(pending)
        self.appended = max(self.appended, command.seq_id)

    def accept(self, command: Command) -> PendingCommand:
        """Add a new command, and append to the journal every command that no longer waits for an earlier one.

        Raises QuotaExceeded or Overloaded if too much waits, unless the run needs this command to make progress.
        """
        self._check_room(command)
        pending = self._add(command)
        self._append_following()
        if pending.durable is None:
            pending.timeout = asyncio.get_running_loop().call_later(self._gap_wait, self._time_out, pending)
        return pending

    @contextmanager
    def arriving(self, command: Command) -> Iterator[None]:
        """Count a new command's bytes while it is checked. Raises as `accept` does."""
        self._check_room(command)
        self._bytes.add(self._tenant, command.size)
        try:
            yield
        finally:
            self._bytes.remove(self._tenant, command.size)

    def answered(self, seq_id: int) -> None:
        """Remove a command that was answered."""
        self._discard(seq_id)
        self._answered = max(self._answered, seq_id)

    def give_up_held(self, is_given_up: Callable[[Command], bool], error: errors.PacelineError) -> None:
        """Give up commands that wait behind a gap: their seq_ids are free."""
        for pending in list(self.by_seq_id.values()):
            if pending.durable is None and is_given_up(pending.command):
                self._discard(pending.command.seq_id)
                pending.move(CommandState.NOT_ARRIVED, error)

    def leave(self, error: errors.PacelineError) -> None:
        """Let go of the commands that have not started. Those in the journal execute after the next start."""
        for pending in list(self.by_seq_id.values()):
            if pending.progress is None:
                self._discard(pending.command.seq_id)
                pending.leave(error)

    async def cancel(self) -> None:
        """Refuse the commands in the journal that have not started; return when that is durable.

        Each keeps its place, where it answers so. Raises as the journal.
        """
        cancelled = []
        for pending in self.by_seq_id.values():
            is_waiting = pending.state in {CommandState.HELD, CommandState.ACCEPTED} and pending.durable is not None
            if is_waiting and pending.progress is None and not pending.may_have_begun:
                # From now on it cannot execute, whether its turn or the journal's sync comes first.
                pending.command = pending.command.cancelled()
                cancelled.append((pending, self._journal.append(CancelRecord(pending.command.seq_id), sync=True)))
        for pending, durable in cancelled:
            await durable
            self.settle(pending)

    def skip_to(self, seq_id: int) -> asyncio.Future[None]:
        """Continue at a command, which may have arrived, and give up those before it. Done when this is durable."""
        self.appended = self._answered = seq_id - 1
        lost = errors.RunStateLost("the run was restored by a later command", field="seq_id")
        for pending in list(self.by_seq_id.values()):
            if pending.progress is None and pending.command.seq_id < seq_id:
                self._discard(pending.command.seq_id)
                if not pending.state.has_ended:
                    pending.move(CommandState.REFUSED, lost)
        rebased = self._journal.append(RebaseRecord(seq_id), sync=True)
        self._append_following()
        return rebased

    @property
    def missing(self) -> int:
        """The first command that has not arrived: those that followed without a gap are in the journal."""
        return self.appended + 1

    def executing(self) -> list[tuple[Command, CommandProgress]]:
        """Return the commands that are executing."""
        return [(one.command, one.progress) for one in self.by_seq_id.values() if one.progress is not None]

    def _check_room(self, command: Command) -> None:
        accepted = sum(one.durable is not None for one in self.by_seq_id.values())
        # With those that are missing before it. A missing one always fits, because the one that is held behind it did.
        if accepted + command.seq_id - self.appended > MAX_OUTSTANDING:
            message = (
                f"is too far ahead: at most {MAX_OUTSTANDING} commands of a run may be accepted and not have ended"
            )
            raise errors.Overloaded(message, field="seq_id", retry_after=_RETRY_SECONDS)
        is_needed = command.seq_id == self.appended + 1 and not any(one.durable for one in self.by_seq_id.values())
        if not is_needed:
            self._bytes.check(self._tenant, command.size)

    def _append_following(self) -> None:
        while following := self.by_seq_id.get(self.appended + 1):
            following.durable = self._journal.append(following.command.to_record(), sync=True)
            following.durable.add_done_callback(partial(self.settle, following))
            following.command = following.command.journaled()
            following.cancel_timeout()
            self.appended += 1

    def settle(self, pending: PendingCommand, _: object = None) -> None:
        """Move a command that has become durable: a refused one has its answer, any other is accepted.

        The journal's future calls this; who awaits that future calls it first, because both wake in the same turn.
        """
        durable, command = pending.durable, pending.command
        if durable is None or not durable.done() or durable.cancelled() or durable.exception() is not None:
            return  # the journal gives it up, see `_withdraw`, or will write it again
        if self.by_seq_id.get(command.seq_id) is not pending or pending.state.has_ended:
            return
        if command.refusal is not None:
            self._bytes.remove(self._tenant, command.size)  # its content is gone, and its call ends now
            pending.command = replace(command, size=0)
            pending.move(CommandState.REFUSED, command.refusal)
        elif pending.state is CommandState.HELD:
            pending.move(CommandState.ACCEPTED)

    def _add(self, command: Command) -> PendingCommand:
        pending = self.by_seq_id[command.seq_id] = PendingCommand(command)
        self._bytes.add(self._tenant, command.size)
        return pending

    def _discard(self, seq_id: int) -> None:
        pending = self.by_seq_id.pop(seq_id)
        pending.cancel_timeout()
        self._bytes.remove(self._tenant, pending.command.size)

    def _withdraw(self, error: errors.PacelineError) -> None:
        """Give up the commands that the journal refused: none was executed, and their seq_ids are free again.

        Those that it may hold, although it could not be synced, stay: they are accepted once they are durable.
        """
        kept = {
            key
            for key, pending in self.by_seq_id.items()
            if pending.durable is not None and not (pending.durable.done() and pending.durable.exception())
        }
        self.appended = max([self._answered, *kept])
        for pending in list(self.by_seq_id.values()):
            if pending.durable is not None and pending.progress is None and pending.command.seq_id > self.appended:
                self._discard(pending.command.seq_id)
                pending.move(CommandState.NOT_ARRIVED, error)

    def _time_out(self, pending: PendingCommand) -> None:
        seq_id = pending.command.seq_id
        if self.by_seq_id.get(seq_id) is not pending or pending.durable is not None:
            return
        missing = self.missing
        self._discard(seq_id)
        message = f"command {missing} did not arrive within {self._gap_wait:g} s; send it, then this one again"
        gap = errors.SeqIdGap(message, field="seq_id", metadata={"missing": str(missing)})
        pending.move(CommandState.NOT_ARRIVED, gap)
