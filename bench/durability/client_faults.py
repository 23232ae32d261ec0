"""Issue commands through a network that fails by plan; check that each executes once, in order, as the client says.

    make client-faults                                  2,000 plans
    python -m bench.durability.client_faults 100
    python -m bench.durability.client_faults 1 --first 4711     repeat one plan, and print its commands

A plan is made from its seed: commands, threads, retry budget, timeouts and faults. The trainer is the real one, with a
tiny model.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from support.faults.fault_run import FaultRun, Outcome, trainer_for_plans

_PART = 100
"""Plans between two reports."""


def main() -> None:
    """Run the plans and report what clients broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=2000, help="number of plans")
    parser.add_argument("--first", type=int, default=0, help="seed of the first plan")
    options = parser.parse_args()
    logging.getLogger("paceline").setLevel(logging.ERROR)  # retries are the rule here
    end, broken = options.first + options.seeds, 0
    with TemporaryDirectory() as directory, trainer_for_plans(Path(directory)) as trainer:
        for first in range(options.first, end, _PART):
            seeds = range(first, min(end, first + _PART))
            broken += _report(asyncio.run(FaultRun(trainer).run_all(seeds)), print_all=options.seeds == 1)
    print(f"client faults: {options.seeds:,} plans, {broken} failed")
    raise SystemExit(bool(broken))


def _report(outcomes: list[Outcome], *, print_all: bool) -> int:
    struck, fates, broken = Counter[str](), Counter[str](), 0
    for outcome in outcomes:
        struck += outcome.struck
        fates += Counter({fate.value: count for fate, count in outcome.fates.items()})
        broken += bool(outcome.differences)
        if outcome.differences or print_all:
            print(f"seed {outcome.plan.seed}: budget {outcome.plan.budget:g} s, {dict(outcome.struck)}")
            print("\n".join(f"    {line}" for line in [*outcome.differences, *outcome.history]))
    counts = ", ".join(f"{count:,} {what}" for what, count in [*fates.most_common(), *struck.most_common()])
    print(f"{len(outcomes)} plans, {broken} failed: {counts}", flush=True)
    return broken


if __name__ == "__main__":
    main()
