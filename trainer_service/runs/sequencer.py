"""Order and exactly-once of one run's commands.

A command arrives with a seq_id and the digest of its payload. It executes when all before it have executed, whatever
the
order of arrival; its answer, good or bad, is kept, and whoever sends the same command again gets that answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

from google.protobuf.message import Message

from paceline import errors
from paceline.log import get_logger

_log = get_logger(__name__)

Command = Callable[[], Awaitable[Message]]

_KEPT_BYTES = 64 << 20
"""Answers kept per run; the newest is kept whatever its size."""
_KEPT_DIGESTS = 10_000
"""Digests kept per run, to tell a repeated command from a reused seq_id after its answer is gone."""


@dataclass(slots=True)
class _Pending:
    digest: bytes
    command: Command
    answer: asyncio.Future[Message]
    started: bool = False


@dataclass(frozen=True, slots=True)
class _Executed:
    digest: bytes
    answer: Message | errors.PacelineError | None
    """None when it is no longer kept."""
    size: int


class Sequencer:
    """Executes one run's commands in order of seq_id, each once."""

    def __init__(self, last_seq_id: int, gap_wait_seconds: float) -> None:
        self._last = last_seq_id
        self._gap_wait = gap_wait_seconds
        self._pending: dict[int, _Pending] = {}
        self._executed: OrderedDict[int, _Executed] = OrderedDict()
        self._kept_bytes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def last_seq_id(self) -> int:
        """Highest seq_id executed."""
        return self._last

    async def execute(self, seq_id: int, digest: bytes, command: Command) -> Message:
        """Execute a command at its turn and return its answer; a repeated one gets the first answer.

        The command goes on when the caller leaves: another may ask for its answer. Raises what the command raised,
        SeqIdReused,
        SeqIdExpired, or SeqIdGap when those before it do not come in time.
        """
        if seq_id == 0:
            raise errors.MissingField("is not set; a run's commands count from 1", field="seq_id")
        if seq_id <= self._last:
            return self._answer_again(seq_id, digest)
        pending = self._pending.get(seq_id)
        if pending is None:
            pending = self._accept(seq_id, digest, command)
        _check_digest(digest, pending.digest)
        return await asyncio.shield(pending.answer)

    def rebase(self, seq_id: int) -> None:
        """Make `seq_id` the next to execute; commands that wait below it are refused. Those executed stay executed."""
        for waiting in [key for key in self._pending if key < seq_id]:
            lost = errors.RunStateLost("the run was restored by a later command", field="seq_id")
            self._settle(self._pending.pop(waiting), lost)
        self._last = max(self._last, seq_id - 1)

    def fail_waiting(self, error: errors.PacelineError) -> None:
        """Refuse every command that has not started. Their seq_ids can be used again."""
        for seq_id in [key for key, pending in self._pending.items() if not pending.started]:
            self._settle(self._pending.pop(seq_id), error)

    async def idle(self) -> None:
        """Return when no command is executing."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _accept(self, seq_id: int, digest: bytes, command: Command) -> _Pending:
        loop = asyncio.get_running_loop()
        pending = _Pending(digest, command, loop.create_future())
        # A failure may find nobody waiting any more; it is kept as the answer all the same.
        pending.answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._pending[seq_id] = pending
        loop.call_later(self._gap_wait, self._give_up, seq_id, pending)
        self._advance()
        return pending

    def _advance(self) -> None:
        pending = self._pending.get(self._last + 1)
        if pending is not None and (self._task is None or self._task.done()):
            pending.started = True
            self._task = asyncio.create_task(self._run(self._last + 1, pending))
            self._task.add_done_callback(lambda _: self._advance())

    async def _run(self, seq_id: int, pending: _Pending) -> None:
        try:
            answer: Message | errors.PacelineError = await pending.command()
        except errors.Unavailable as error:
            # Not executed: the same seq_id may be sent again.
            del self._pending[seq_id]
            self._settle(pending, error)
            return
        except errors.PacelineError as error:
            answer = error
        except Exception:
            # Whatever it was, its answer is kept like any other, so that the commands after it are not held up.
            error_id = uuid4().hex
            _log.exception("command failed", seq_id=seq_id, error_id=error_id)
            message = f"internal error; the service's log has it under {error_id}"
            answer = errors.Internal(message, metadata={"error_id": error_id})
        del self._pending[seq_id]
        self._last = max(self._last, seq_id)
        self._keep(seq_id, pending.digest, answer)
        self._settle(pending, answer)

    def _give_up(self, seq_id: int, pending: _Pending) -> None:
        if self._pending.get(seq_id) is not pending or pending.started:
            return
        missing = next((earlier for earlier in range(self._last + 1, seq_id) if earlier not in self._pending), None)
        if missing is None:
            asyncio.get_running_loop().call_later(self._gap_wait, self._give_up, seq_id, pending)
            return
        del self._pending[seq_id]
        message = f"command {missing} did not come within {self._gap_wait:g} s; send it, then this one again"
        self._settle(pending, errors.SeqIdGap(message, field="seq_id", metadata={"missing": str(missing)}))

    def _answer_again(self, seq_id: int, digest: bytes) -> Message:
        executed = self._executed.get(seq_id)
        if executed is not None:
            _check_digest(digest, executed.digest)
        if executed is None or executed.answer is None:
            raise errors.SeqIdExpired(
                f"was executed, but its answer is no longer kept; go on from {self._last + 1}",
                field="seq_id",
                metadata={"last_seq_id": str(self._last)},
            )
        if isinstance(executed.answer, errors.PacelineError):
            raise executed.answer
        return executed.answer

    def _keep(self, seq_id: int, digest: bytes, answer: Message | errors.PacelineError) -> None:
        size = answer.ByteSize() if isinstance(answer, Message) else 0
        self._executed[seq_id] = _Executed(digest, answer, size)
        self._kept_bytes += size
        for old, executed in list(self._executed.items()):
            if self._kept_bytes <= _KEPT_BYTES or old == seq_id:
                break
            self._kept_bytes -= executed.size
            self._executed[old] = _Executed(executed.digest, None, 0)
        while len(self._executed) > _KEPT_DIGESTS:
            _, executed = self._executed.popitem(last=False)
            self._kept_bytes -= executed.size

    @staticmethod
    def _settle(pending: _Pending, answer: Message | errors.PacelineError) -> None:
        if isinstance(answer, errors.PacelineError):
            pending.answer.set_exception(answer)
        else:
            pending.answer.set_result(answer)


def _check_digest(given: bytes, known: bytes) -> None:
    if given != known:
        raise errors.SeqIdReused("was used with another payload; take the next one", field="seq_id")
