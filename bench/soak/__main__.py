"""Measure the effect of five publishes a second on sampling, and check that every token comes from its version.

    make bench-soak        python -m bench.soak [--minutes 10] [--exact-seconds 20] [--reload-seconds 20]

Four runs of the embedded model are trained and published in turn while sixteen streams decode, in bfloat16. Periods
with publishing alternate with periods of the same training without publishing. The trainer's engine scores every
sequence at the version stamped on it; the difference is compared with that of stock vLLM and stock transformers for the
base model. Then the same, shorter, in float32, and once more against vLLM's own server, whose adapter is reloaded under
the same name: that arm has to fail, which shows that the check detects the error.

The trainer, the scoring and this process run on the first core, the sampler on the last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from make_model import default_directory, make_model

from bench.budgets import budget
from bench.parity.stock import BFLOAT16_FACTOR, FLOAT32_BUDGET, measure_stock
from bench.publish.times import STREAM_TOKENS
from bench.soak.ours import RANK, Soak
from bench.soak.score import Sampled, Scorer
from bench.soak.stock import reload_under_load

STREAMS, PUBLISHES_A_SECOND = 16, 5.0
QUIET_SHARE = 0.34
"""Seconds without publishing per second with it."""
Dtype = Literal["float32", "bfloat16"]


@dataclass
class Figures:
    """Measurements of one dtype."""

    differences: list[np.ndarray[tuple[int]]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Tokens per second with publishing divided by those without, for each turn."""
    publishes: int = 0
    seconds: float = 0.0
    """Seconds with publishing."""
    sequences: int = 0
    aborted: int = 0

    @property
    def difference(self) -> float:
        """Mean |difference| over all tokens."""
        return float(np.concatenate(self.differences).mean())


async def one_part(soak: Soak, seconds: float, *, publishing: bool) -> tuple[list[Sampled], int, float]:
    """Decode and train for some time; return the sequences, the turns of training, and tokens per second."""
    start = time.perf_counter()
    samples, steps = await asyncio.gather(
        soak.decode(STREAMS, start + seconds),
        soak.train(PUBLISHES_A_SECOND, start + seconds, publishing=publishing),
    )
    return samples, steps, len(samples) * STREAM_TOKENS / (time.perf_counter() - start)


async def soak(model: Path, dtype: Dtype, seconds: float, turns: int, scratch: Path) -> tuple[Figures, list[Path]]:
    """Alternate parts with and without publishing and score every sequence; also return a run's versions."""
    figures, cores = Figures(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    scorer = Scorer(model, dtype, RANK)
    async with Soak.start(model, scratch, cores, dtype) as ours:
        await one_part(ours, 3.0, publishing=True)
        for number in range(turns):
            quiet, _, without = await one_part(ours, seconds * QUIET_SHARE, publishing=False)
            start = time.perf_counter()
            busy, steps, speed = await one_part(ours, seconds, publishing=True)
            figures.seconds += time.perf_counter() - start
            figures.publishes += steps
            figures.ratios.append(speed / without)
            figures.sequences += len(quiet) + len(busy)
            figures.differences.append(await asyncio.to_thread(scorer.differences, quiet + busy, ours.find))
            print(f"turn {number + 1} of {turns}: {speed:.0f} tokens/s, {without:.0f} without publishing, "
                  f"{steps / seconds:.1f} publishes a second, load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
        figures.aborted = ours.aborted
        versions = ours.distinct(busy[0].run)
    os.sched_setaffinity(0, set(cores))
    return figures, versions


def report(dtype: str, figures: Figures) -> None:
    """Print the figures of one dtype."""
    print(f"\n{dtype}: {figures.sequences} sequences of {STREAM_TOKENS} tokens, {figures.publishes} publishes in "
          f"{figures.seconds:.0f} s; mean |difference| {figures.difference:.2e}")  # fmt: skip
    budget(f"{dtype}: aborted requests", figures.aborted, 0, at_most=True)


def main() -> None:
    """Run the three parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of publishing in bfloat16, a turn each")
    parser.add_argument("--exact-seconds", type=float, default=20.0, help="of publishing in float32")
    parser.add_argument("--reload-seconds", type=float, default=20.0, help="of loading again under the same name")
    options = parser.parse_args()
    model, turns = make_model(default_directory()), max(1, round(options.minutes))
    with TemporaryDirectory() as scratch:
        fast, _ = asyncio.run(soak(model, "bfloat16", 60 * options.minutes / turns, turns, Path(scratch)))
    report("bfloat16", fast)
    budget("tokens/s lost to publishing, share", 1 - float(np.median(fast.ratios)), 0.02, at_most=True)
    budget("parity bfloat16", fast.difference, BFLOAT16_FACTOR * measure_stock(model), at_most=True)
    with TemporaryDirectory() as scratch:
        exact, versions = asyncio.run(soak(model, "float32", options.exact_seconds, 1, Path(scratch)))
        report("float32", exact)
        budget("parity float32", exact.difference, FLOAT32_BUDGET, at_most=True)
        core = max(os.sched_getaffinity(0))
        again = reload_under_load(model, versions, Path(scratch), core, dtype="float32", streams=STREAMS,
                                  seconds=options.reload_seconds)  # fmt: skip
        stale = Scorer(model, "float32", RANK).differences(asyncio.run(again), lambda _, number: versions[number])
    print(f"vLLM's server, loaded again under one name: mean |difference| {stale.mean():.2e} over {len(stale)} tokens")
    budget("the check sees a same-name reload: mean |difference|", float(stale.mean()), FLOAT32_BUDGET)


if __name__ == "__main__":
    main()
