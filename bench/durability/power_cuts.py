"""Cut the power at many moments of a trainer's life, in all ways that a file system may keep unsynced writes.

    make power-cuts                             1,000 cuts
    python -m bench.durability.power_cuts 200 --seed 3

A trainer is used once while its calls to the file system are recorded. For each cut, a trainer is started on the files
that the cut leaves and asked for every answer that it gave before the cut. Every tenth time, it is also used to the end
of the script, where weights and optimizer state must equal the recording byte for byte. The result is printed and
appended to docs/track-record.csv with the command that reproduces it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.chaos.power_cut_run import PowerCuts
from support.models.tiny_models import make_tiny_llama

from bench.durability.track_record import Row, add_row

_TO_THE_END = 10
"""After every so many cuts, the trainer is used to the end of the script."""
_REPORT_SECONDS = 60.0


def main() -> None:
    """Run the cuts, compare the results, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cuts", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=6, help="how long the recorded scripts are")
    parser.add_argument("--jobs", type=int, default=2, help="trainers at the same time")
    options = parser.parse_args()
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        cuts = PowerCuts(Path(directory), make_tiny_llama(Path(directory) / "model"), options.rounds)
        try:
            found, seconds = asyncio.run(cut_all(cuts, options.cuts, options.seed, options.jobs))
        finally:
            cuts.close()
    print("\n".join(found) or "nothing torn, nothing lost, nothing refused")
    arguments = f"{options.cuts} --seed {options.seed} --rounds {options.rounds}"
    print(add_row(make_row(arguments, options.cuts, len(cuts.calls), seconds, found)), end="")
    sys.exit(bool(found))


async def cut_all(cuts: PowerCuts, count: int, seed: int, jobs: int) -> tuple[list[str], float]:
    """Record, then check cuts; return the errors found, and the seconds per cut."""
    await cuts.record()
    print(f"recorded {len(cuts.calls)} calls that change or sync files", flush=True)
    chosen = list(enumerate(cuts.cuts(count, seed)))
    waiting, found = list(reversed(chosen)), []
    start = said = time.perf_counter()

    async def work() -> None:
        nonlocal said
        while waiting:
            number, cut = waiting.pop()
            for line in await cuts.check(cut, to_the_end=number % _TO_THE_END == 0):
                found.append(line)
                print(line, flush=True)
            if time.perf_counter() - said > _REPORT_SECONDS:
                said = time.perf_counter()
                print(f"{count - len(waiting)} of {count} cuts", flush=True)

    await asyncio.gather(*(work() for _ in range(jobs)))
    return found, (time.perf_counter() - start) / count


def make_row(arguments: str, cuts: int, calls: int, seconds: float, found: list[str]) -> Row:
    """Return the row of the track record."""
    what = "nothing" if not found else f"{len(found)}: {found[0]}"
    return Row(
        test="power cuts",
        amount=f"{cuts} of {calls} calls",
        seconds_each=f"{seconds:.2f}",
        found=what,
        command=f"python -m bench.durability.power_cuts {arguments}",
    )


if __name__ == "__main__":
    main()
