"""A sequencer on a real journal, with an executor that records what it executes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest_asyncio

from paceline import errors
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.trainer.v1 import trainer_service_pb2 as pb
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import Counters
from trainer_service.journal.history import read_history
from trainer_service.journal.journal import RunJournal
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.runs.command import Answers, Command, Outcome
from trainer_service.runs.sequencer import Sequencer

NO_FAILPOINTS = Failpoints("")
NO_GUARD = DiskGuard(0)
_OPEN = []
"""Runs of the current test."""


class Executor:
    """Records commands. By seq_id, `act` holds what a command does first, and `rest` what it does after capturing."""

    def __init__(self):
        self.died = asyncio.Event()
        """Set when a command has raised that the engine is not there."""
        self.ran = []
        self.act = {}
        self.rest = {}
        self.ended = []

    async def execute(self, command, progress):
        try:
            return await self._execute(command, progress)
        except errors.EngineUnavailable:
            self.died.set()
            raise

    async def _execute(self, command, progress):
        await asyncio.sleep(0)
        if command.refusal is not None:
            raise command.refusal
        reply = await self.act[command.seq_id]() if command.seq_id in self.act else None
        self.ran.append(command.seq_id)
        if command.seq_id in self.rest:
            progress.capture()
            await self.rest[command.seq_id](progress)
        self.ended.append(command.seq_id)
        is_save = command.method == "SaveCheckpoint"
        return Outcome(reply or (pb.SaveCheckpointResponse() if is_save else pb.OptimStepResponse(step=command.seq_id)))

    def counters(self):
        return Counters(step=len(self.ran))

    def abandon(self, command):
        pass

    async def executed(self, command):
        pass

    async def save(self, seq_id):
        pass

    async def close(self):
        pass


class JournaledRun:
    """A run's sequencer and executor on a directory."""

    def __init__(
        self,
        directory,
        gap_wait=10.0,
        max_attempts=2,
        *,
        started=True,
        guard=NO_GUARD,
        waiting_bytes=None,
        kept_bytes=64 << 20,
    ):
        self.directory = directory
        if not directory.exists():
            RunJournal.create(directory, 1)
        self.executor = Executor()
        history = read_history(directory)
        self.journal = RunJournal(directory, history, ThreadPoolExecutor(2), NO_FAILPOINTS, guard)
        answers = Answers(kept_bytes)
        for record in history.answers.values():
            answers.keep(record)
        executed = max(history.answers, default=history.base - 1)
        self.sequencer = Sequencer(
            self.journal,
            answers,
            executed,
            gap_wait_seconds=gap_wait,
            max_attempts=max_attempts,
            failpoints=NO_FAILPOINTS,
            tenant="team",
            waiting_bytes=waiting_bytes or WaitingBytes(),
        )
        _OPEN.append(self)
        self.sequencer.attempts = history.attempts
        for seq_id, record in history.commands.items():
            if seq_id not in history.answers:
                self.sequencer.restore(Command.from_record(record, is_cancelled=seq_id in history.cancelled))
        if started:
            self.start()

    def send_large(self, seq_id, size=4 << 20, refusal=None):
        """Send a command of `size` bytes, refused on arrival if `refusal` is given."""
        command = Command.of(pb.ForwardBackwardRequest(run_id="run", seq_id=seq_id, loss_fn="x" * size), "team")
        return asyncio.ensure_future(self.sequencer.execute(command.refused(refusal) if refusal else command))

    def start(self):
        self.sequencer.start(self.executor)

    def send(self, seq_id, rate=1e-3, run_id="run", attachment=0):
        """Send a command (OptimStep); return a task for its answer."""
        request = pb.OptimStepRequest(run_id=run_id, seq_id=seq_id, attachment=attachment)
        request.adamw.learning_rate = rate
        return asyncio.ensure_future(self.sequencer.execute(Command.of(request, "team")))

    def save(self, seq_id):
        """Send a command that only reads the state (SaveCheckpoint); return a task for its answer."""
        request = pb.SaveCheckpointRequest(run_id="run", seq_id=seq_id, name="x")
        return asyncio.ensure_future(self.sequencer.execute(Command.of(request, "team")))

    def load(self, seq_id):
        """Send a command that replaces the run's state (LoadCheckpoint); return a task for its answer."""
        request = pb.LoadCheckpointRequest(run_id="run", seq_id=seq_id, path="x")
        return asyncio.ensure_future(self.sequencer.execute(Command.of(request, "team")))

    async def recover(self):
        """Execute again the commands that later ones overtook, then start."""
        await self.sequencer.recover()
        for seq_id in self.sequencer.overtaken:
            await self.sequencer.execute_again(seq_id, self.executor)
        self.start()

    async def held(self):
        """Wait until the engine has died, and what was executing there has ended; stop the run as the service does."""
        await self.executor.died.wait()
        self.sequencer.pause()
        await self.sequencer.recover()

    def history(self):
        return read_history(self.directory)


def refusal(error):
    async def act():
        raise error

    return act


def blocked(release):
    async def act():
        await release.wait()

    return act


@pytest_asyncio.fixture(autouse=True)
async def leave_runs():
    """Start no more commands of the runs that a test leaves: closing its event loop ends the commands before them."""
    yield
    for run in _OPEN:
        run.sequencer.pause()
    _OPEN.clear()
