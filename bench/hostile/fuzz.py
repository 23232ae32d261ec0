"""Send hostile calls to the three real services while another tenant trains; check failures, losses and memory.

    make fuzz                                   1,000,000 cases
    python -m bench.hostile.fuzz 100000 --seed 3
    python -m bench.hostile.fuzz 1 --seed 3 --first 4711    repeat one case

Every case is determined by the seed, its number, and how far the hostile tenant's runs have come. The sampler has the
engine hf; the model is tiny and random.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from support.fuzz.fuzz_run import CONTEXT, ENOUGH_CASES, SETTINGS, Fuzz, Outcome, all_refused, is_flat
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

_PART = 50_000
"""Cases between two reports."""


def main() -> None:
    """Run the cases and report the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "model", context=CONTEXT)
        (Path(directory) / "state").mkdir()
        cluster = Cluster.make(Path(directory) / "state", model, **SETTINGS)
        failures, memory, done, accepted = 0, list[int](), 0, Counter[str]()
        with cluster.running():
            while done < options.cases:
                part, start = min(_PART, options.cases - done), monotonic()
                outcome = asyncio.run(Fuzz(cluster, options.seed).run(options.first + done, part))
                done += part
                memory += outcome.memory
                accepted += outcome.accepted
                failures += _report(outcome, done, part / (monotonic() - start))
    if options.cases >= ENOUGH_CASES and (refused := all_refused(accepted)):
        sys.stdout.write(f"every call was refused: {', '.join(refused)}\n")
        failures += len(refused)
    flat = is_flat(memory)
    sys.stdout.write(f"fuzz: {done:,} cases, {failures} failed, memory {'flat' if flat else 'GREW'}\n")
    raise SystemExit(bool(failures) or not flat)


def _report(outcome: Outcome, done: int, speed: float) -> int:
    codes = ", ".join(f"{code} {count:,}" for code, count in outcome.codes.most_common())
    size, trained = outcome.memory[-1] >> 20, outcome.trained
    text = f"{done:,} cases, {speed:,.0f} a second, {size} MiB, the canary trained {trained} times: {codes}"
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()  # a log shows it at once, too
    for failure in outcome.failures[:20]:
        sys.stdout.write(f"{failure}\n")
    sys.stdout.flush()
    return len(outcome.failures)


if __name__ == "__main__":
    main()
