"""Measure how long saving and publishing hold up training: from the start of the command to the start of the next.

    make bench-saves

On the embedded model, a rank 16 adapter on all linear layers with AdamW's state, float32, one thread. A pass, the save,
and a pass that is already waiting go through the run's sequencer and journal and the engine process, as the service
executes them. Two arms alternate: the save as the service does it, captured and written in the background, and the same
save finished before the next command starts.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from google.protobuf.message import Message
from make_model import default_directory, make_model

from bench.budgets import budget
from paceline import layout
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine_link.client import Captured, EngineProcess
from trainer_service.engine_link.options import EngineOptions
from trainer_service.failpoints import NO_FAILPOINTS
from trainer_service.journal.format import Counters
from trainer_service.journal.history import read_history
from trainer_service.journal.journal import RunJournal
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.runs.command import Answers, Command, Outcome
from trainer_service.runs.progress import CommandProgress
from trainer_service.runs.sequencer import Sequencer

BUDGET = 5.0
ADAM = AdamParams(learning_rate=1e-4)
KINDS = ("save", "publish")
Save = Callable[[str, Path, Captured], Awaitable[None]]


class Executor:
    """Trains, saves and publishes as the service's executor does, and records when each command starts."""

    def __init__(self, engine: EngineProcess, directory: Path, data: list[Datum]) -> None:
        self.is_blocking = False
        self.begins: dict[int, float] = {}
        self._engine, self._directory, self._data = engine, directory, data

    async def execute(self, command: Command, progress: CommandProgress) -> Outcome:
        """Execute a command."""
        self.begins[command.seq_id] = perf_counter()
        match command.method:
            case "ForwardBackward":
                await self._engine.forward_backward("run", self._data, ForwardBackwardSpec("cross_entropy"))
                reply: Message = pb.ForwardBackwardResponse()
            case "OptimStep":
                output = await self._engine.optim_step("run", ADAM)
                reply = pb.OptimStepResponse(step=output.step)
            case "SaveCheckpoint":
                await self._write(command, progress, self._engine.save_state, durable=True)
                reply = pb.SaveCheckpointResponse()
            case _:
                await self._write(command, progress, self._engine.save_adapter, durable=False)
                reply = pb.PublishWeightsResponse()
        return Outcome(reply)

    async def _write(self, command: Command, progress: CommandProgress, save: Save, *, durable: bool) -> None:
        final = self._directory / str(command.seq_id)
        async with layout.new_directory_async(final, durable=durable) as staging:
            await save("run", staging, _nothing if self.is_blocking else progress.capture)
            progress.release()
        await asyncio.to_thread(shutil.rmtree, final)

    def counters(self) -> Counters:
        """Return empty counters."""
        return Counters()

    def abandon(self, command: Command) -> None:
        """Do nothing."""

    async def executed(self, command: Command) -> None:
        """Take no snapshot."""

    async def save(self, seq_id: int) -> None:
        """Take no snapshot."""

    async def close(self) -> None:
        """Do nothing; the caller closes the engine."""


def _nothing() -> None:
    pass


class Run:
    """A run's sequencer, to which commands are sent ahead."""

    def __init__(self, executor: Executor, directory: Path) -> None:
        RunJournal.create(directory, 1)
        journal = RunJournal(directory, read_history(directory), ThreadPoolExecutor(1), NO_FAILPOINTS, DiskGuard(0))
        self._sequencer = Sequencer(
            journal,
            Answers(),
            0,
            gap_wait_seconds=60,
            max_attempts=2,
            failpoints=NO_FAILPOINTS,
            tenant="team",
            waiting_bytes=WaitingBytes(),
        )
        self._sequencer.start(executor)
        self._executor = executor
        self._seq_id = 0

    async def pause(self, saving: str, *, is_blocking: bool) -> float:
        """Train, save and train; return the milliseconds from the save's start to the next command's start."""
        self._executor.is_blocking = is_blocking
        save = pb.SaveCheckpointRequest if saving == "save" else pb.PublishWeightsRequest
        sent = [self._send(message) for message in (pb.ForwardBackwardRequest, save, pb.ForwardBackwardRequest)]
        await asyncio.gather(*(task for _, task in sent), self._send(pb.OptimStepRequest)[1])
        begins = self._executor.begins
        return 1e3 * (begins[sent[2][0]] - begins[sent[1][0]])

    def _send(self, message: Callable[..., Message]) -> tuple[int, asyncio.Task[Message]]:
        self._seq_id += 1
        command = Command.of(message(run_id="run", seq_id=self._seq_id), "team")
        return self._seq_id, asyncio.ensure_future(self._sequencer.execute(command))


async def main() -> None:
    """Measure both kinds and print the pauses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path())
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        async with EngineProcess(EngineOptions(str(make_model(default_directory())), "bench")) as engine:
            adapter = await engine.create_run("run", LoraConfig(rank=16))
            millions = adapter.trainable_parameters / 1e6
            print(f"{millions:.1f} M parameters, {12 * millions:.0f} MB with AdamW's state")
            run = Run(Executor(engine, directory, make_data()), directory / "journal")
            for kind in KINDS:
                await measure(run, kind, options.rounds)


async def measure(run: Run, kind: str, rounds: int) -> None:
    """Alternate the arms; print their medians and the budget's line."""
    await run.pause(kind, is_blocking=False)
    ours: list[float] = []
    blocking: list[float] = []
    for _ in range(rounds):
        blocking.append(await run.pause(kind, is_blocking=True))
        ours.append(await run.pause(kind, is_blocking=False))
    pause, blocked = statistics.median(ours), statistics.median(blocking)
    print(f"{kind}: {blocked:7.1f} ms blocking, {pause:5.1f} ms in the background ({min(ours):.1f} to {max(ours):.1f})")
    budget(f"{kind} pause, ms", pause, BUDGET, at_most=True)


def make_data() -> list[Datum]:
    """Make one short datum: the pause does not depend on the batch."""
    rng = np.random.default_rng(0)
    return [Datum.from_completion(list(rng.integers(0, 1000, 8)), list(rng.integers(0, 1000, 8)))]


if __name__ == "__main__":
    asyncio.run(main())
