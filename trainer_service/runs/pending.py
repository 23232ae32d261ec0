"""The commands of a run that have not ended, and the states that each passes through.

                  ┌──► WITHDRAWN ◄──┐
                  │ gap,            │ the journal
                  │ superseded      │ is full
    arrives ──► HELD ──────────► WRITING ────────► ACCEPTED ◄──► EXECUTING ──► SUCCEEDED
                  │ lost            │ refused input    │ cancelled      │
                  └─────────────────┴──────────────► REFUSED ◄──────────┘

From HELD, WRITING and ACCEPTED it is LEFT when the service stops or the run is gone.

A refused command keeps its place until its turn, although its caller has the answer: what follows must not overtake it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from time import perf_counter

from paceline import errors, tracing
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.types import CommandState
from trainer_service.journal.format import CancelRecord, Counters, RebaseRecord
from trainer_service.journal.journal import RunJournal
from trainer_service.runs.command import Answer, Command
from trainer_service.runs.progress import CommandProgress

MAX_OUTSTANDING = 1024
"""Most commands of a run that may have arrived and not had their turn, or not ended."""
READING = frozenset({"SaveCheckpoint", "PublishWeights"})
"""Commands that let the next one start before they end."""

_RETRY_SECONDS = 1.0


class PendingState(Enum):
    """Where a command is on its way through a run."""

    HELD = auto()
    """In memory, behind one that has not arrived."""
    WRITING = auto()
    """All before it have arrived, and it is being written to the journal; its callers see it held."""
    ACCEPTED = auto()
    """Durable: it executes once, in its place."""
    EXECUTING = auto()
    SUCCEEDED = auto()
    REFUSED = auto()
    WITHDRAWN = auto()
    """Not accepted: its seq_id is free."""
    LEFT = auto()
    """This process does not end it: the service stops, or the run is gone."""

    @property
    def public(self) -> CommandState:
        """The state as callers are told of it; LEFT ends their streams instead."""
        return _PUBLIC[self]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more becomes of it in this process, unless it is sent again."""
        return self not in MOVES


_State = PendingState

MOVES: Mapping[PendingState, Set[PendingState]] = {
    _State.HELD: {_State.WRITING, _State.REFUSED, _State.WITHDRAWN, _State.LEFT},
    _State.WRITING: {_State.ACCEPTED, _State.REFUSED, _State.WITHDRAWN, _State.LEFT},
    _State.ACCEPTED: {_State.EXECUTING, _State.REFUSED, _State.LEFT},
    # Accepted again, to execute again: the engine died.
    _State.EXECUTING: {_State.ACCEPTED, _State.SUCCEEDED, _State.REFUSED},
}
"""The moves that are permitted, from each state that is not an end."""

_PUBLIC = {
    _State.HELD: CommandState.HELD,
    _State.WRITING: CommandState.HELD,
    _State.ACCEPTED: CommandState.ACCEPTED,
    _State.EXECUTING: CommandState.EXECUTING,
    _State.SUCCEEDED: CommandState.SUCCEEDED,
    _State.REFUSED: CommandState.REFUSED,
    _State.WITHDRAWN: CommandState.NOT_ARRIVED,
    _State.LEFT: CommandState.UNKNOWN,
}


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command that has not ended, or was refused and waits for its turn. `move` alone changes its state."""

    command: Command
    state: PendingState = PendingState.HELD
    answer: Answer | None = None
    """What it answered, or why it was withdrawn or left; None in other states."""
    progress: CommandProgress | None = None
    """Set while the command executes."""
    place: Counters | None = None
    """Counters after the command in the run's order; set if it was captured before it ended."""
    may_have_begun: bool = False
    """Whether it may have made something that others can see, in this process or before a restart."""
    begun_at: float = 0.0
    """The loop's time when it began to execute."""
    timeout: asyncio.TimerHandle | None = None
    """Set while earlier commands are missing."""
    watchers: list[Callable[[PendingCommand], None]] = field(default_factory=list)
    """Called after each change of state that callers are told of."""

    @property
    def given_up(self) -> errors.PacelineError | None:
        """Why it is not accepted, or why this process does not end it; None in other states."""
        is_given_up = self.state in {PendingState.WITHDRAWN, PendingState.LEFT}
        return self.answer if is_given_up and isinstance(self.answer, errors.PacelineError) else None

    def move(self, state: PendingState, answer: Answer | None = None) -> None:
        """Change the state and tell the watchers; `answer` belongs to the states that have one."""
        if state not in MOVES.get(self.state, ()):
            raise RuntimeError(f"command {self.command.seq_id} cannot go from {self.state.name} to {state.name}")
        was = self.state
        self.state, self.answer = state, answer
        if (was, state) != (PendingState.HELD, PendingState.WRITING):  # it is held for its callers until it is durable
            for watcher in list(self.watchers):
                watcher(self)

    def cancel_timeout(self) -> None:
        """Cancel the timeout: no earlier command is missing, or this one is gone; the timer would keep it in memory."""
        if self.timeout is not None:
            self.timeout.cancel()
            self.timeout = None


class PendingCommands:
    """A run's commands that have not ended; each is journaled once all commands before it have arrived."""

    def __init__(
        self,
        journal: RunJournal,
        last_seq_id: int,
        gap_wait_seconds: float,
        tenant: str,
        waiting_bytes: WaitingBytes,
        on_durable: Callable[[], None],
    ) -> None:
        """Accept commands after `last_seq_id`, which is in the journal; count bytes of waiting ones as `tenant`'s.

        `on_durable` is called when a command has been accepted, or durably refused.
        """
        self.by_seq_id: dict[int, PendingCommand] = {}
        self.appended = self._answered = last_seq_id
        """Highest seq_id that was appended to the journal."""
        self._journal = journal
        self._gap_wait = gap_wait_seconds
        self._tenant = tenant
        self._bytes = waiting_bytes
        self._on_durable = on_durable
        journal.on_refused = self._withdraw

    def restore(self, command: Command) -> None:
        """Add a command from the journal."""
        pending = self._add(command)
        # A save or a publish may have been seen before the trainer ended.
        pending.may_have_begun = command.method in READING
        pending.move(PendingState.WRITING)
        self._move_durable(pending, command.refusal)
        self.appended = max(self.appended, command.seq_id)

    def accept(self, command: Command) -> PendingCommand:
        """Add a new command, and append to the journal every command that no longer waits for an earlier one.

        Raises QuotaExceeded or Overloaded if too much waits, unless the run needs this command to make progress.
        """
        self._check_capacity(command)
        pending = self._add(command)
        self._append_following()
        if pending.state is PendingState.HELD:
            pending.timeout = asyncio.get_running_loop().call_later(self._gap_wait, self._time_out, pending)
        return pending

    @contextmanager
    def arriving(self, command: Command) -> Iterator[None]:
        """Count a new command's bytes while it is checked. Raises as `accept` does."""
        self._check_capacity(command)
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
            if pending.state is PendingState.HELD and is_given_up(pending.command):
                self._discard(pending.command.seq_id)
                pending.move(PendingState.WITHDRAWN, error)

    def leave(self, error: errors.PacelineError) -> None:
        """Let go of the commands that have not started. Those in the journal execute after the next start."""
        for pending in list(self.by_seq_id.values()):
            if pending.progress is None:
                self._discard(pending.command.seq_id)
                if not pending.state.has_ended:
                    pending.move(PendingState.LEFT, error)

    async def cancel(self, is_cancelled: Callable[[Command], bool]) -> None:
        """Refuse commands in the journal that have not started; return when that is durable.

        Each keeps its place, where it answers so. Raises as the journal.
        """
        cancelled = []
        for pending in filter(lambda one: is_cancelled(one.command), self.by_seq_id.values()):
            if pending.state in {PendingState.WRITING, PendingState.ACCEPTED} and not pending.may_have_begun:
                # From now on it cannot execute, whether its turn or the journal's sync comes first.
                pending.command = pending.command.cancelled()
                cancelled.append((pending, self._journal.append(CancelRecord(pending.command.seq_id), sync=True)))
        for pending, durable in cancelled:
            await durable
            self._move_durable(pending, pending.command.refusal)

    def skip_to(self, seq_id: int) -> asyncio.Future[None]:
        """Continue at a command, which may have arrived, and give up those before it. Done when this is durable."""
        self.appended = self._answered = seq_id - 1
        lost = errors.RunStateLost("the run was restored by a later command", field="seq_id")
        for pending in list(self.by_seq_id.values()):
            if pending.progress is None and pending.command.seq_id < seq_id:
                self._discard(pending.command.seq_id)
                if not pending.state.has_ended:
                    pending.move(PendingState.REFUSED, lost)
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

    def _check_capacity(self, command: Command) -> None:
        accepted = sum(one.state is not PendingState.HELD for one in self.by_seq_id.values())
        # With those that are missing before it. A missing one always fits, because the one that is held behind it did.
        if accepted + command.seq_id - self.appended > MAX_OUTSTANDING:
            message = (
                f"is too far ahead: at most {MAX_OUTSTANDING} commands of a run may wait for their turn, with those "
                "that were refused or cancelled before it"
            )
            raise errors.Overloaded(message, field="seq_id", retry_after=_RETRY_SECONDS)
        is_needed = command.seq_id == self.appended + 1 and not accepted
        if not is_needed:
            self._bytes.check(self._tenant, command.size)

    def _append_following(self) -> None:
        while following := self.by_seq_id.get(self.appended + 1):
            following.move(PendingState.WRITING)
            durable = self._journal.append(following.command.to_record(), sync=True)
            durable.add_done_callback(partial(self._written, following, following.command.refusal, perf_counter()))
            following.command = following.command.journaled()
            following.cancel_timeout()
            self.appended += 1

    def _written(
        self,
        pending: PendingCommand,
        refusal: errors.PacelineError | None,
        begun: float,
        durable: asyncio.Future[None],
    ) -> None:
        tracing.record("journal", begun, perf_counter(), pending.command.trace)
        if not durable.cancelled() and durable.exception() is None:  # one that failed was withdrawn
            # One that was cancelled meanwhile is refused when that is durable too, and accepted until then.
            self._move_durable(pending, refusal)

    def _move_durable(self, pending: PendingCommand, refusal: errors.PacelineError | None) -> None:
        """Move a command that is durable: one with a refusal that is durable has its answer, any other is accepted."""
        command = pending.command
        if self.by_seq_id.get(command.seq_id) is not pending or pending.state.has_ended:
            return
        if refusal is not None:
            self._bytes.remove(self._tenant, command.size)  # its content is gone, and its call ends now
            pending.command = replace(command, size=0)
            pending.move(PendingState.REFUSED, refusal)
        elif pending.state is PendingState.WRITING:
            pending.move(PendingState.ACCEPTED)
        self._on_durable()

    def _add(self, command: Command) -> PendingCommand:
        pending = self.by_seq_id[command.seq_id] = PendingCommand(command)
        self._bytes.add(self._tenant, command.size)
        return pending

    def _discard(self, seq_id: int) -> None:
        pending = self.by_seq_id.pop(seq_id)
        pending.cancel_timeout()
        self._bytes.remove(self._tenant, pending.command.size)

    def _withdraw(self, error: errors.PacelineError, refused: Sequence[int]) -> None:
        """Give up the commands that the journal refused: none was executed, and their seq_ids are free again.

        Those that it may hold, although it could not be synced, stay: they are accepted once they are durable.
        """
        withdrawn = [self.by_seq_id[seq_id] for seq_id in refused if seq_id in self.by_seq_id]
        for pending in withdrawn:
            self._discard(pending.command.seq_id)
        kept = (key for key, pending in self.by_seq_id.items() if pending.state is not PendingState.HELD)
        self.appended = max([self._answered, *kept])
        for pending in withdrawn:
            pending.move(PendingState.WITHDRAWN, error)

    def _time_out(self, pending: PendingCommand) -> None:
        seq_id = pending.command.seq_id
        if self.by_seq_id.get(seq_id) is not pending or pending.state is not PendingState.HELD:
            return
        missing = self.missing
        self._discard(seq_id)
        message = f"command {missing} did not arrive within {self._gap_wait:g} s; send it, then this one again"
        gap = errors.SeqIdGap(message, field="seq_id", metadata={"missing": str(missing)})
        pending.move(PendingState.WITHDRAWN, gap)
