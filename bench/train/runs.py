"""Measure what sharing passes gains over runs that take turns, and what it loses against one run with all the tokens.

    make bench-runs        python -m bench.train.runs [--runs 8] [--sequences 2] [--tokens 4 16 64 256]
                           [--models smollm2 qwen2.5-0.5b] [--dtypes bfloat16 float32]

The engine runs in this process on one thread. Each round draws new batches, and every arm computes them once, in turn:
all runs in joint passes, one run after the other, and one run with the tokens of all. Optimizer steps between the arms
are not timed. This is repeated for each sequence length. Then two more measurements: how much longer a pass takes after
a pass of another run, and how fairly runs with commands of very different sizes are served.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from make_model import default_directory, make_model

from bench.budgets import budget
from bench.random_models import make_random_model
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.microbatch.job import Datums
from trainer_service.engine.microbatch.scheduler import Scheduler
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.worker import keep_freed_memory
from trainer_service.engine_link.options import EngineOptions

LOSS = "importance_sampling"
ALONE = "all tokens, one run"
RANKS = (8, 16, 32)
STEP = AdamParams(learning_rate=1e-5)
SWEEPS = 4
"""How often a pass moves a factor's bytes: read forward and backward, its gradient written, then checked."""
Clock = Callable[[], float]
Arm = Callable[[PeftEngine, dict[str, list[Datum]]], None]


class Demand:
    """A command as the scheduler sees it."""

    forward_only = alone = False

    def __init__(self, run_id: str, data: Sequence[Datum]) -> None:
        self.run_id = run_id
        self.waiting = Datums(data, ()).segments()


def draw(rng: np.random.Generator, sequences: int, tokens: int, vocab_size: int) -> list[Datum]:
    """Draw sequences of about `tokens` tokens, the second half of each labelled."""
    data = []
    for length in rng.integers(max(2, tokens // 2), tokens + tokens // 2 + 1, sequences):
        ids = rng.integers(0, vocab_size, length + 1).tolist()
        half = length // 2
        data.append(Datum.from_completion(ids[:-half], ids[-half:], logprobs=-1.0, advantages=float(rng.normal())))
    return data


def make_engine(model: Path, dtype: str, runs: Sequence[str]) -> tuple[PeftEngine, int]:
    """Load the model with one run per name, of mixed ranks, and one run for all tokens.

    Also return how many more bytes a pass over the runs moves than a pass over that one run (see SWEEPS).
    """
    engine = PeftEngine(EngineOptions(str(model), "embedded", dtype=dtype, logprob_chunk=256, joint_passes=True))  # type: ignore[arg-type]
    weights = -engine.create_run(ALONE, LoraConfig(rank=16)).trainable_parameters
    for place, run_id in enumerate(runs):
        weights += engine.create_run(run_id, LoraConfig(RANKS[place % len(RANKS)], seed=place)).trainable_parameters
    return engine, 4 * SWEEPS * weights


def copy_rate(clock: Clock) -> float:
    """Return the bytes per second that a copy reads and writes, of memory that is in no cache."""
    source, times = torch.ones(1 << 26), []
    target = torch.empty_like(source)
    for _ in range(7):
        start = clock()
        target.copy_(source)
        times.append(clock() - start)
    return 2 * source.nbytes / float(np.median(times))


def train_jointly(engine: PeftEngine, batches: dict[str, list[Datum]]) -> None:
    """Start every run's command, then advance until all are done."""
    jobs = [engine.begin(run_id, data, ForwardBackwardSpec(LOSS)) for run_id, data in batches.items()]
    while jobs:
        done = engine.advance(lambda _: None)
        for job in done:
            job.output()
        jobs = [job for job in jobs if job not in done]


def train_in_turn(engine: PeftEngine, batches: dict[str, list[Datum]]) -> None:
    """Finish each run's command before starting the next."""
    for run_id, data in batches.items():
        engine.forward_backward(run_id, data, ForwardBackwardSpec(LOSS))


def measure(
    engine: PeftEngine, runs: Sequence[str], tokens: int, moving: float, options: argparse.Namespace, clock: Clock
) -> None:
    """Time the arms round by round, with sequences of about `tokens` tokens; print their speeds and the budgets."""
    rng, vocab_size = np.random.default_rng(0), engine.describe().vocab_size
    seconds: dict[str, list[float]] = {"joint passes": [], "one after the other": [], ALONE: []}
    counts: list[int] = []
    for turn in range(options.rounds + 1):
        batches = {run_id: draw(rng, options.sequences, tokens, vocab_size) for run_id in runs}
        every = [datum for data in batches.values() for datum in data]
        arms: list[tuple[str, Arm, dict[str, list[Datum]]]] = [
            ("joint passes", train_jointly, batches),
            ("one after the other", train_in_turn, batches),
            (ALONE, train_in_turn, {ALONE: every}),
        ]
        for name, train, work in arms:
            start = clock()
            train(engine, work)
            if turn:  # The first warms up.
                seconds[name].append(clock() - start)
            for run_id in work:
                engine.optim_step(run_id, STEP)
        counts += [sum(len(datum.model_input) for datum in every)] if turn else []
    print(f"\n{len(runs)} runs, each {options.sequences} sequences of {tokens} tokens on average")
    report(f"{engine.describe().dtype}, {options.sequences * tokens} tokens a run:", counts, seconds, moving)


def report(name: str, counts: Sequence[int], seconds: dict[str, list[float]], moving: float) -> None:
    """Print the speed of each arm, and the budgets.

    `moving` is the time in seconds to move the bytes that a joint pass moves in addition to those of one run.
    """
    speeds = {arm: np.asarray(counts) / np.asarray(times) for arm, times in seconds.items()}
    for arm, speed in speeds.items():
        times = 1e3 * np.asarray(seconds[arm])
        middle, worst = np.median(times), np.percentile(times, 99)
        print(f"{arm:22}{np.median(speed):9.0f} tokens/s{middle:10.0f} ms median{worst:8.0f} ms p99")
    least = float(np.median(seconds[ALONE]))
    print(f"moving the runs' own bytes takes {1e3 * moving:.0f} ms: at most {least / (least + moving):.2f} of one run")
    joint = speeds["joint passes"]
    budget(f"{name} joint against one after the other", float(np.median(joint / speeds["one after the other"])), 3)
    budget(f"{name} joint against one run with all tokens", float(np.median(joint / speeds[ALONE])), 0.95)


def measure_switch(engine: PeftEngine, runs: Sequence[str], rounds: int, clock: Clock) -> None:
    """Time small passes of one run after its own pass and after another run's, alternating."""
    data = draw(np.random.default_rng(1), 1, 2, 1000)
    before = {"same": runs[0], "other": runs[len(RANKS)]}  # Both have the same rank.
    times: dict[str, list[float]] = {name: [] for name in before}
    for turn in range(4 * rounds + 1):
        for name, run_id in before.items():
            engine.forward_backward(run_id, data, ForwardBackwardSpec(LOSS, forward_only=True))
            start = clock()
            engine.forward_backward(runs[0], data, ForwardBackwardSpec(LOSS, forward_only=True))
            if turn:
                times[name].append(1e3 * (clock() - start))
    same, other = (float(np.median(times[name])) for name in before)
    print(f"pass of one sequence: {same:.1f} ms after the same run, {other:.1f} ms after another")
    budget(f"{engine.describe().dtype} switching runs, ms", max(0.0, other - same), 1, at_most=True)


def served_fairly(passes: int) -> float:
    """Return Jain's index of the tokens served to eight runs that always wait (Jain et al., DEC-TR-301, 1984)."""
    rng, scheduler, served = np.random.default_rng(2), Scheduler[Demand](4096), Counter[str]()
    demands: dict[str, Demand] = {}
    for _ in range(passes):
        for place in range(8):
            run_id = f"run{place}"
            if run_id not in demands or not demands[run_id].waiting:
                demands[run_id] = Demand(run_id, draw(rng, int(4 ** rng.uniform(3, 4)), 16 << (place % 4), 100))
        (shares,) = scheduler.next_passes(list(demands.values()))
        for demand, segments in shares:
            served[demand.run_id] += sum(segment.length for segment in segments)
    values = np.asarray(list(served.values()), float)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def run(name: str, options: argparse.Namespace, clock: Clock, scratch: Path) -> None:
    """Measure with one model in each dtype."""
    model = make_model(default_directory()) if name == "smollm2" else make_random_model(name, scratch)
    runs = [f"run{i}" for i in range(options.runs)]
    for dtype in options.dtypes:
        engine, more_bytes = make_engine(model, dtype, runs)
        rate = copy_rate(clock)
        print(
            f"\n{name}, {dtype}: joint passes move {more_bytes >> 20} MiB more than one run's at {rate / 1e9:.1f} GB/s"
        )
        for tokens in options.tokens:
            measure(engine, runs, tokens, more_bytes / rate, options, clock)
        measure_switch(engine, runs, options.rounds, clock)


def main() -> None:
    """Measure with each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=2, help="in a run's batch")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 16, 64, 256], help="of a sequence, on average")
    parser.add_argument("--models", nargs="+", choices=("smollm2", "qwen2.5-0.5b"), default=["smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu where others use the machine too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    for name in options.models:
        with TemporaryDirectory() as directory:
            run(name, options, clock, Path(directory) / name)
    budget("Jain index of tokens served over 500 passes", served_fairly(500), 0.95)


if __name__ == "__main__":
    main()
