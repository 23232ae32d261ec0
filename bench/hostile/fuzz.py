"""Send hostile calls to the three real services while another tenant trains; check failures, losses and memory.

    make fuzz                                   1,000,000 cases
    python -m bench.hostile.fuzz 100000 --seed 3
    python -m bench.hostile.fuzz 1 --seed 3 --first 4711    repeat one case

Every case is determined by the seed and its number. The sampler has the engine hf; the model is tiny and random.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from support.fuzz.fuzz_run import SETTINGS, Fuzz, Outcome, is_flat
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

_PART = 50_000
"""Cases between two reports; the canary trains once in each."""


def main() -> None:
    """Run the cases and report the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "model")
        (Path(directory) / "state").mkdir()
        cluster = Cluster.make(Path(directory) / "state", model, **SETTINGS)
        failures, memory, done = 0, list[int](), 0
        with cluster.running():
            while done < options.cases:
                part, start = min(_PART, options.cases - done), monotonic()
                outcome = asyncio.run(Fuzz(cluster, options.seed).run(options.first + done, part))
                done += part
                memory += outcome.memory
                failures += _report(outcome, done, part / (monotonic() - start))
    flat = is_flat(memory)
    sys.stdout.write(f"fuzz: {done:,} cases, {failures} failed, memory {'flat' if flat else 'GREW'}\n")
    raise SystemExit(bool(failures) or not flat)


def _report(outcome: Outcome, done: int, speed: float) -> int:
    codes = ", ".join(f"{code} {count:,}" for code, count in outcome.codes.most_common())
    sys.stdout.write(f"{done:,} cases, {speed:,.0f} a second, {outcome.memory[-1] >> 20} MiB: {codes}\n")
    sys.stdout.flush()  # a log shows it at once, too
    changed = outcome.losses != outcome.expected
    if changed:
        sys.stdout.write(f"the canary's losses changed: {outcome.losses}, alone {outcome.expected}\n")
    for failure in outcome.failures[:20]:
        sys.stdout.write(f"{failure}\n")
    sys.stdout.flush()
    return len(outcome.failures) + changed


if __name__ == "__main__":
    main()
