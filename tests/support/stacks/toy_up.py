"""A supervisor of toy services: `python -m support.stacks.toy_up PLANS.json`.

PLANS.json: {"services": {name: environment}, "after": {name: the one before it}, "logs": directory,
"until_eof": bool, "stop_seconds": seconds}
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from paceline.up import supervisor
from paceline.up.plan import CannotStart, Plan
from paceline.up.run import say


def main(path: str) -> None:
    given = json.loads(Path(path).read_text())
    plans = [
        Plan(
            name,
            "support.stacks.toy_service",
            environment,
            environment["TOY_HEALTH"],
            "toy",
            stop_seconds=given["stop_seconds"],
            after=given["after"].get(name, ""),
        )
        for name, environment in given["services"].items()
    ]
    supervisor.BROKEN_STOP_SECONDS = given["stop_seconds"]
    running = supervisor.Supervisor(plans, Path(given["logs"]), say, lambda: say("up"))
    try:
        asyncio.run(running.run(until_eof=given["until_eof"]))
    except CannotStart as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main(sys.argv[1])
