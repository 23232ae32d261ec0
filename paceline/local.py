"""The three services as a child of this process: for scripts, benches and notebooks.

with local_services(UpOptions(model="..."), Path("services.log")) as services:
client = paceline.ServiceClient(services.address, services.api_key)
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic

from paceline.rpc.health import wait_until_serving
from paceline.up_plan import Plan, UpOptions, make_plans, read_or_make_key

_START_SECONDS = 600.0
_LOG_END = 4000


@dataclass(frozen=True, slots=True)
class LocalServices:
    """How to reach them."""

    address: str
    api_key: str


@contextmanager
def local_services(
    options: UpOptions, log: Path, starting: Callable[[str], object] = lambda _: None
) -> Iterator[LocalServices]:
    """Run `paceline up` until the block ends; its output goes to `log`.

    `starting` is told the name of each service that is waited for. Raises RuntimeError, with the end of the log, when
    one does not start.
    """
    state = Path(options.state).resolve()
    key_file = read_or_make_key(state)
    flags = [f"--{field.name.replace('_', '-')}={getattr(options, field.name)}" for field in fields(options)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # In a session of its own, so that Ctrl-C reaches it through this process alone.
        command = [sys.executable, "-m", "paceline.cli", "up", *flags]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            for plan in make_plans(options, state):
                starting(plan.name)
                _wait_until_serving(plan, process, log)
            yield LocalServices(options.address, key_file.read_text().strip())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _wait_until_serving(plan: Plan, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = monotonic() + _START_SECONDS

    def is_over() -> bool:
        return process.poll() is not None or monotonic() > deadline

    if not wait_until_serving(plan.health, plan.service, is_over):
        raise RuntimeError(f"the {plan.name} did not start:\n{log.read_text(errors='replace')[-_LOG_END:]}")
