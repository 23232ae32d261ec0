"""Measure the time to page a run out to disk and in again, and the memory that many runs hold.

    make bench-paging

Runs with adapters of the embedded model take turns. There are more of them than memory may hold, so each turn pages one
out and one in. Printed are the peak bytes of the tensors that all runs hold (counted, not the size of the process), and
the milliseconds of a turn that pages, beside a turn of a run that is in memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from make_model import default_directory, make_model

from bench.budgets import budget
from paceline.types import AdamParams, Datum, ForwardBackwardSpec, LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions

ALLOWED = 4
"""Number of runs whose weights, gradient and moments may be in memory."""
ROUND_TRIP_BUDGET = 10.0
"""Nanoseconds per byte of a run, for paging out and in again."""
DATA = [Datum.from_completion([1, 2, 3], [4, 5])]


class Paged:
    """An engine with many runs and memory for a few."""

    def __init__(self, model: Path, scratch: str, runs: int, rank: int, device: str) -> None:
        plain = PeftEngine(EngineOptions(str(model), "embedded", device=device))
        self.run_bytes = 16 * plain.create_run("run", LoraConfig(rank)).trainable_parameters
        del plain
        options = EngineOptions(
            str(model), "embedded", device=device, run_memory_bytes=ALLOWED * self.run_bytes, scratch_dir=scratch
        )
        self.engine = PeftEngine(options)
        self.names = [f"run{number}" for number in range(runs)]
        self.peak = 0
        for number, name in enumerate(self.names):
            self.engine.create_run(name, LoraConfig(rank, seed=number))
            self.step(name)

    def step(self, name: str) -> None:
        """Take a step and leave a gradient pending, so that the run holds all that a run can hold."""
        self.engine.forward_backward(name, DATA, ForwardBackwardSpec("cross_entropy"))
        self.engine.optim_step(name, AdamParams())
        self.engine.forward_backward(name, DATA, ForwardBackwardSpec("cross_entropy"))
        self.peak = max(self.peak, self.engine.held_bytes)

    def touch(self, name: str) -> float:
        """Page a run in; return the milliseconds until the device is done."""
        start = time.perf_counter()
        self.engine.load_run(name)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3


def measure(paged: Paged, rounds: int) -> None:
    """Time the turns; print the figures and the budgets."""
    times: dict[str, list[float]] = {"paged": [], "resident": []}
    for turn in range(rounds):
        name = paged.names[turn % len(paged.names)]
        times["paged"].append(paged.touch(name))
        times["resident"].append(paged.touch(name))
        paged.peak = max(paged.peak, paged.engine.held_bytes)
    for name, values in times.items():
        print(
            f"turn of a run that is {name:8}: p50 {np.median(values):8.3f} ms, p99 {np.percentile(values, 99):8.3f} ms"
        )
    peak_runs = round(paged.peak / paged.run_bytes, 3)  # A run on disk keeps 4 bytes for each of its tensors.
    print(f"{len(paged.names)} runs of {paged.run_bytes / 1e6:.1f} MB each; held at most {paged.peak / 1e6:.1f} MB")
    budget("memory held, in runs", peak_runs, ALLOWED, at_most=True)
    cost = float(np.median(times["paged"])) * 1e6 / paged.run_bytes
    budget("paging out and in, ns a byte", cost, ROUND_TRIP_BUDGET, at_most=True)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scratch", help="directory to page to; by default one for temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        model = make_model(default_directory())
        measure(Paged(model, scratch, options.runs, options.rank, options.device), options.rounds)


if __name__ == "__main__":
    main()
