"""Measure what the journal adds to a step: a ForwardBackward, then an OptimStep, as a lone client sends them.

    make bench-journal

On the embedded model, float32, one thread, journal on the disk of --directory. The journal's part is the time until a
command is durable plus the time until its answer is written. For a client that sends ahead, or for runs that share the
engine, most of it overlaps the execution of other commands.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from make_model import default_directory, make_model

from bench.budgets import budget
from paceline import codec
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine_link.client import EngineProcess
from trainer_service.engine_link.options import EngineOptions
from trainer_service.failpoints import Failpoints
from trainer_service.journal.format import Counters
from trainer_service.journal.history import read_history
from trainer_service.journal.journal import RunJournal
from trainer_service.limits.disk_guard import DiskGuard
from trainer_service.runs.command import Command, Outcome, answer_to_record

BUDGET = 0.05
ADAM = AdamParams(learning_rate=1e-4)


async def main() -> None:
    """Measure and print the journal's share of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--datums", type=int, default=8)
    parser.add_argument("--directory", type=Path, default=Path())
    options = parser.parse_args()
    data = make_data(options.datums)
    with TemporaryDirectory(dir=options.directory) as directory:
        RunJournal.create(Path(directory) / "journal", 1)
        journal = RunJournal(
            Path(directory) / "journal",
            read_history(Path(directory) / "journal"),
            ThreadPoolExecutor(1),
            Failpoints(""),
            DiskGuard(0),
        )
        async with EngineProcess(EngineOptions(str(make_model(default_directory())), "bench")) as engine:
            await engine.create_run("run", LoraConfig(rank=16))
            parts = [await step(engine, journal, data, number) for number in range(options.steps + 1)][1:]
        await journal.flush()
    shares = [spent / total for spent, total in parts]
    tokens = sum(len(datum.model_input) for datum in data)
    print(
        f"{options.datums} datums, {tokens} tokens, {journal.appended_bytes / len(parts) / 1e3:.0f} kB journal a step"
    )
    print(f"step    {1e3 * statistics.median(total for _, total in parts):8.1f} ms")
    print(f"journal {1e3 * statistics.median(spent for spent, _ in parts):8.1f} ms")
    share = statistics.median(shares)
    budget("journal's share of a step", share, BUDGET, at_most=True)


async def step(engine: EngineProcess, journal: RunJournal, data: list[Datum], number: int) -> tuple[float, float]:
    """Take a step; return the journal's seconds and the total seconds."""
    start = perf_counter()
    request = pb.ForwardBackwardRequest(
        run_id="run", seq_id=2 * number + 1, data=map(codec.datum_to_proto, data), loss_fn="importance_sampling"
    )
    first = Command.of(request, "team")
    spent = await timed(journal.append(first.to_record(), sync=True))
    output = await engine.forward_backward("run", data, ForwardBackwardSpec("importance_sampling"))
    reply = pb.ForwardBackwardResponse(
        outputs=[codec.output_to_proto(datum) for datum in output.loss_fn_outputs], metrics=output.metrics
    )
    spent += await timed(journal.append(answer_to_record(first, Outcome(reply), Counters()), sync=False))
    second = Command.of(
        pb.OptimStepRequest(seq_id=2 * number + 2, adamw=pb.AdamwParams(learning_rate=ADAM.learning_rate)), "team"
    )
    spent += await timed(journal.append(second.to_record(), sync=True))
    update = await engine.optim_step("run", ADAM)
    answer = pb.OptimStepResponse(step=update.step, grad_norm=update.grad_norm)
    spent += await timed(journal.append(answer_to_record(second, Outcome(answer), Counters()), sync=False))
    return spent, perf_counter() - start


async def timed(written: asyncio.Future[None]) -> float:
    """Wait until a record is written; return the seconds."""
    start = perf_counter()
    await written
    return perf_counter() - start


def make_data(count: int) -> list[Datum]:
    """Make datums of different lengths, 32 to 256 tokens, the second half of each labelled."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(32), np.log(256), count)).astype(int)
    return [
        Datum.from_completion(
            list(rng.integers(0, 1000, n // 2)), list(rng.integers(0, 1000, n // 2)), logprobs=-1.0, advantages=0.5
        )
        for n in lengths
    ]


if __name__ == "__main__":
    asyncio.run(main())
