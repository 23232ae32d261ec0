"""Start the services, say what runs where, and supervise them until the end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.machine import visible_gpus
from paceline.up.checks import check_model, check_packages, check_ports, read_settings
from paceline.up.plan import Plan, UpOptions, locked_state, make_plans, read_or_make_key
from paceline.up.supervisor import Supervisor

UP = "Paceline is up"
"""Prefix of the line that reports that all services are ready."""


def up(options: UpOptions, *, until_eof: bool = False) -> None:
    """Run the services until Ctrl-C, SIGTERM or, with `until_eof`, the end of standard input.

    Raises CannotStart if the services cannot be started or one was given up, MissingExtra if packages are missing.
    """
    state = Path(options.state).resolve()
    plans = make_plans(options, state, os.environ)
    check_packages(options.engine)
    check_model(options.model)
    with locked_state(state):
        _run(options, state, plans, until_eof=until_eof)


def _run(options: UpOptions, state: Path, plans: Sequence[Plan], *, until_eof: bool) -> None:
    key_file = read_or_make_key(state)
    check_ports(read_settings(plans, os.environ))
    say(_describe_shares(plans, os.environ))
    say(f"their logs are in {state / 'logs'}")

    def announce() -> None:
        say(f"{UP}; Ctrl-C stops it. In another terminal:")
        say(f"  export PACELINE_ADDRESS={options.address}")
        say(f"  export PACELINE_API_KEY=$(cat {key_file})")
        say("or, for clients of Tinker's API:")
        http = plans[-1].environment["PACELINE_GATEWAY_HTTP_LISTEN"]
        say(f"  export TINKER_BASE_URL=http://{http} TINKER_API_KEY=tml-$(cat {key_file})")

    supervisor = Supervisor(plans, state / "logs", say, announce)
    asyncio.run(supervisor.run(until_eof=until_eof))


def _describe_shares(plans: Sequence[Plan], environment: Mapping[str, str]) -> str:
    """Describe each service's share of the machine, and idle GPUs."""
    has = ", ".join(f"{plan.name}: {plan.share}" for plan in plans if plan.share)
    used = {gpu for plan in plans for gpu in plan.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")}
    idle = [gpu for gpu in visible_gpus(environment) if gpu not in used]
    if not idle:
        return f"starting {has}"
    more = "PACELINE_TRAINER_RANKS and PACELINE_SAMPLER_TENSOR_PARALLEL_SIZE give more than one to a service"
    return f"starting {has}; idle: GPU {', '.join(idle)} ({more})"


def say(line: str) -> None:
    """Print a line, unless nobody is left to read it: the terminal is closed, or Ctrl-C has ended the pipe's reader."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
