"""Kill the trainer and its engine many times while runs train, and compare them with runs that nothing happened to.

    make chaos                        1,000 kills
    python bench/chaos.py 100 --seed 3
    python bench/chaos.py 100 --joint           runs share passes; equal within 1e-5

Clients send every command until it is answered, through a proxy that loses, delays, repeats and reorders. What came of
it is printed and appended, with the command that repeats it, to docs/track-record.md.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from chaos import Chaos, Outcome  # noqa: E402
from tiny_models import make_tiny_llama  # noqa: E402

RECORD = ROOT / "docs" / "track-record.md"
_REPORT_SECONDS = 60.0


def main() -> None:
    """Kill, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--joint", action="store_true", help="let runs share passes; compare within 1e-5")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "model")
        chaos = Chaos(Path(directory), model, options.seed, joint_passes=options.joint)
        try:
            outcome = asyncio.run(kill(chaos, options.kills))
        finally:
            chaos.close()
    for point, count in outcome.kills.most_common():
        print(f"{count:6} {point}")
    print("\n".join(outcome.differences) or "no difference")
    row = make_row(f"{options.kills} --seed {options.seed}{' --joint' if options.joint else ''}", outcome)
    with RECORD.open("a") as file:
        file.write(row)
    print(row, end="")
    sys.exit(bool(outcome.differences))


async def kill(chaos: Chaos, kills: int) -> Outcome:
    """Kill and compare, and say every minute how far that is."""
    task = asyncio.create_task(chaos.run(kills))
    while not (await asyncio.wait({task}, timeout=_REPORT_SECONDS))[0]:
        print(f"{chaos.kills.total()} of {kills} kills", flush=True)
    return await task


def make_row(arguments: str, outcome: Outcome) -> str:
    """Return the row of the record."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = "nothing" if not outcome.differences else f"{len(outcome.differences)}: {outcome.differences[0]}"
    total = outcome.kills.total()
    return (
        f"| {datetime.now(UTC):%Y-%m-%d} | {git.stdout.strip()} | {total} at {len(outcome.kills)} points | "
        f"{outcome.commands} | {outcome.faults} | {outcome.seconds / total:.2f} s | {found} | "
        f"`python bench/chaos.py {arguments}` |\n"
    )


if __name__ == "__main__":
    main()
