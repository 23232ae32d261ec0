"""A run's commands that have no answer yet; each is journaled once all commands before it have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.protobuf.message import Message

from paceline import errors
from paceline.waiting_bytes import WaitingBytes
from trainer_service.journal.journal import RunJournal
from trainer_service.journal.records import Facts
from trainer_service.runs.command import Answer, Command
from trainer_service.runs.progress import CommandProgress


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command without an answer."""

    command: Command
    answer: asyncio.Future[Message]
    durable: asyncio.Future[None] | None = None
    """Set when the command is appended to the journal; done when it is durable."""
    progress: CommandProgress | None = None
    """Set while the command executes."""
    place: Facts | None = None
    """Facts after the command in the run's order; set if it was captured before it ended."""
    giving_up: asyncio.TimerHandle | None = None
    """Timeout, set while earlier commands are missing."""

    def settle(self, answer: Answer) -> None:
        """Resolve the answer for every waiter."""
        if isinstance(answer, errors.PacelineError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)

    def waits_no_longer(self) -> None:
        """Cancel the timeout: no earlier command is missing, or this one is gone; the timer would keep it in memory."""
        if self.giving_up is not None:
            self.giving_up.cancel()
            self.giving_up = None

    def put_off(self, error: errors.PacelineError) -> None:
        """Fail the current waiters with `error`; later ones wait for the answer."""
        self.settle(error)
        self.answer = _new_answer()


class PendingCommands:
    """Commands by seq_id, from arrival to answer."""

    def __init__(
        self, journal: RunJournal, last_seq_id: int, gap_wait_seconds: float, tenant: str, waiting_bytes: WaitingBytes
    ) -> None:
        """Accept commands after `last_seq_id`, which is in the journal; count bytes of waiting ones as `tenant`'s."""
        self.appended = self._answered = last_seq_id
        """Highest seq_id that was appended to the journal."""
        self._journal = journal
        self._gap_wait = gap_wait_seconds
        self._tenant = tenant
        self._bytes = waiting_bytes
        self._pending: dict[int, PendingCommand] = {}
        self._change = asyncio.Event()
        journal.on_refused = self._refuse

    def __iter__(self) -> Iterator[PendingCommand]:
        return iter(list(self._pending.values()))

    def get(self, seq_id: int) -> PendingCommand | None:
        """Return a command; None if it was answered or has not arrived."""
        return self._pending.get(seq_id)

    def restore(self, command: Command) -> None:
        """Add a command from the journal."""
        pending = self._add(command)
        pending.durable = asyncio.get_running_loop().create_future()
        pending.durable.set_result(None)
        self.appended = max(self.appended, command.seq_id)

    def accept(self, command: Command) -> PendingCommand:
        """Add a new command, and append to the journal every command that no longer waits for an earlier one.

        Raises QuotaExceeded or Overloaded if too many bytes of commands wait, unless the run needs this command to make
        progress.
        """
        if not self._is_next(command):
            self._bytes.check(self._tenant, command.size)
        pending = self._add(command)
        while following := self._pending.get(self.appended + 1):
            following.durable = self._journal.append(following.command.to_record(), sync=True)
            following.waits_no_longer()
            self.appended += 1
        if pending.durable is None:
            pending.giving_up = asyncio.get_running_loop().call_later(self._gap_wait, self._give_up, pending)
        return pending

    def remove(self, seq_id: int) -> None:
        """Remove a command that was answered."""
        self._let_go(seq_id)
        self._answered = max(self._answered, seq_id)

    def drop(self, is_dropped: Callable[[PendingCommand], bool], error: errors.PacelineError) -> None:
        """Refuse the selected commands that have not started."""
        for pending in self:
            if pending.progress is None and is_dropped(pending):
                self._let_go(pending.command.seq_id)
                pending.settle(error)

    def skip_to(self, seq_id: int) -> None:
        """Continue at a command; give up those before it."""
        self.appended = self._answered = seq_id - 1
        lost = errors.RunStateLost("the run was restored by a later command", field="seq_id")
        self.drop(lambda pending: pending.command.seq_id < seq_id, lost)

    def under_way(self) -> list[tuple[Command, CommandProgress]]:
        """Return the commands that are executing."""
        return [
            (pending.command, pending.progress) for pending in self._pending.values() if pending.progress is not None
        ]

    async def changed(self) -> None:
        """Wait for the next `notify`."""
        await self._change.wait()

    def notify(self) -> None:
        """Wake everything that waits in `changed`."""
        self._change.set()
        self._change = asyncio.Event()

    def _is_next(self, command: Command) -> bool:
        """Return whether a command is the first missing one and every command before it is answered."""
        return command.seq_id == self.appended + 1 and not any(one.durable for one in self._pending.values())

    def _add(self, command: Command) -> PendingCommand:
        pending = self._pending[command.seq_id] = PendingCommand(command, _new_answer())
        self._bytes.add(self._tenant, command.size)
        return pending

    def _let_go(self, seq_id: int) -> None:
        pending = self._pending.pop(seq_id)
        pending.waits_no_longer()
        self._bytes.remove(self._tenant, pending.command.size)

    def _refuse(self, error: errors.PacelineError) -> None:
        """Withdraw the commands that could not be journaled: none was executed, and their seq_ids are free again."""
        durable = {
            key
            for key, pending in self._pending.items()
            if pending.durable is not None and pending.durable.done() and not pending.durable.exception()
        }
        self.appended = max([self._answered, *durable])
        self.drop(lambda pending: pending.command.seq_id > self.appended and pending.durable is not None, error)

    def _give_up(self, pending: PendingCommand) -> None:
        seq_id = pending.command.seq_id
        if self._pending.get(seq_id) is not pending or pending.durable is not None:
            return
        self._let_go(seq_id)
        missing = next(earlier for earlier in range(self.appended + 1, seq_id) if earlier not in self._pending)
        message = f"command {missing} did not come within {self._gap_wait:g} s; send it, then this one again"
        pending.settle(errors.SeqIdGap(message, field="seq_id", metadata={"missing": str(missing)}))


def _new_answer() -> asyncio.Future[Message]:
    answer = asyncio.get_running_loop().create_future()
    # Nobody may be waiting for a failure: retrieve it, so that asyncio does not log it as never retrieved.
    answer.add_done_callback(lambda future: future.cancelled() or future.exception())
    return answer
