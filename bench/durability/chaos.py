"""Inject faults while runs of two tenants train, publish and sample; compare them with undisturbed runs.

    make chaos                                  2,000 kills, stops, full disks and flipped bits
    python -m bench.durability.chaos 100 --seed 3
    python -m bench.durability.chaos 100 --faults kills,stops
    python -m bench.durability.chaos 100 --joint           runs share passes; equal within 1e-5

Trainer, engine, sampler (engine hf) and gateway are killed, also while they restart. Their settings are the defaults;
runs share passes only with --joint. Clients send every command until it is answered, through a proxy that loses,
delays, repeats and reorders messages. The disk is filled if this process may mount a file system; otherwise the size of
the trainer's files is limited. The result is printed and appended to docs/track-record.csv with the command that
reproduces it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from support.chaos.chaos_run import FAULTS, Chaos, Outcome
from support.models.tiny_models import make_tiny_llama

from bench.durability.track_record import Row, add_row

_REPORT_SECONDS = 60.0


def main() -> None:
    """Run the faults, compare the results, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--joint", action="store_true", help="let runs share passes; compare within 1e-5")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}; separated by commas")
    options = parser.parse_args()
    faults = frozenset(options.faults.split(","))
    if unknown := faults - set(FAULTS):
        parser.error(f"--faults {', '.join(sorted(unknown))}: choose of {', '.join(FAULTS)}")
    with TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "model")
        chaos = Chaos(Path(directory), model, options.seed, joint_passes=options.joint, faults=faults)
        try:
            outcome = asyncio.run(kill(chaos, options.kills))
        finally:
            chaos.close()
    for point, count in [*outcome.kills.most_common(), *outcome.notes.most_common()]:
        print(f"{count:6} {point}")
    print("\n".join(outcome.differences) or "no difference")
    arguments = [str(options.kills), f"--seed {options.seed}", *(["--joint"] if options.joint else [])]
    if faults != set(FAULTS):
        arguments.append(f"--faults {options.faults}")
    print(add_row(make_row(" ".join(arguments), outcome)), end="")
    sys.exit(bool(outcome.differences))


async def kill(chaos: Chaos, kills: int) -> Outcome:
    """Run the faults and the comparison; print the progress every minute."""
    task = asyncio.create_task(chaos.run(kills))
    while not (await asyncio.wait({task}, timeout=_REPORT_SECONDS))[0]:
        print(f"{chaos.kills} of {kills} kills", flush=True)
    return await task


def _by_kind(outcome: Outcome) -> list[tuple[str, int]]:
    """Count the faults other than kills, and their consequences, by kind; flipped bits without their files."""
    kinds: Counter[str] = Counter()
    for note, count in outcome.notes.items():
        kinds[note.partition(" in ")[0]] += count
    return [(kind, count) for kind, count in kinds.most_common() if count]


def make_row(arguments: str, outcome: Outcome) -> Row:
    """Return the row of the track record."""
    found = "nothing" if not outcome.differences else f"{len(outcome.differences)}: {outcome.differences[0]}"
    others = ", ".join(f"{count} {what}" for what, count in _by_kind(outcome)) or "none"
    total = outcome.kills.total()
    return Row(
        test="chaos",
        amount=f"{total} at {len(outcome.kills)} points",
        other_faults=others,
        commands=str(outcome.commands),
        samples=str(outcome.samples),
        network_faults=str(outcome.faults),
        seconds_each=f"{outcome.seconds / total:.2f}",
        found=found,
        command=f"python -m bench.durability.chaos {arguments}",
    )


if __name__ == "__main__":
    main()
