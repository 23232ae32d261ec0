"""`python -m paceline.tracing FILE...`: a trace of a run's last steps, from the files of spans."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.tracing.command import trace


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m paceline.tracing", description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, help="the services' trace_file, or directories of *.jsonl")
    parser.add_argument("--run", default="", help="run; empty: the one that stepped last")
    parser.add_argument("--steps", type=int, default=3, help="how many of its last steps")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="file to write")
    return trace(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
