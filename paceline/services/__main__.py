"""Run a service or one of its tools: `python -m paceline.services MODULE [ARGUMENTS]`."""

from __future__ import annotations

import sys

from paceline.extras import MissingExtra
from paceline.services import EXTRAS, program_of


def main() -> None:
    """Run the program that the first argument names, with the others as its arguments."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python -m paceline.services ({' | '.join(EXTRAS)}) [arguments]")
    module = sys.argv.pop(1)
    try:
        program = program_of(module)
    except (LookupError, MissingExtra) as failure:
        raise SystemExit(str(failure)) from None
    program()


if __name__ == "__main__":
    main()
