"""`make demo`: start the three services with the embedded model, train it by reinforcement learning, stop them.

python scripts/demo.py [options of examples/rl_loop.py]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from make_model import default_directory, make_model
from rich.console import Console

from paceline.up.local import LocalServices, local_services
from paceline.up.plan import CannotStart, UpOptions
from paceline.up.run import UP

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".paceline" / "demo"
ADDRESS = "127.0.0.1:50250"
"""Not the default, so that the demo can run beside `make up`."""


def main(arguments: list[str]) -> int:
    """Run the demo; return the exit status of the loop."""
    console, start = Console(), perf_counter()
    making = "creating the embedded model (once)"
    with console.status(making) as status:
        # Without a terminal a status is not drawn.
        say = status.update if console.is_terminal else print_progress
        if not default_directory().exists():
            say(making)
        model = make_model(default_directory())
        options = UpOptions(str(model), state=str(STATE), address=ADDRESS, max_lora_rank=16)
        try:
            with local_services(options, STATE / "services.log", say) as services:
                status.stop()
                console.print(f"trainer, sampler and gateway are up after {perf_counter() - start:.0f} s")
                code = run_loop(services, arguments)
        except CannotStart as failure:
            sys.exit(str(failure))
    console.print(f"done in {perf_counter() - start:.0f} s")
    return code


def print_progress(line: str) -> None:
    """Print a line, except the last one of `paceline up`, which addresses those who run it themselves."""
    if not line.startswith(UP):
        print(line, flush=True)


def run_loop(services: LocalServices, arguments: list[str]) -> int:
    """Run examples/rl_loop.py against the services."""
    environment = {
        **os.environ,
        "PACELINE_ADDRESS": services.address,
        "PACELINE_API_KEY": services.api_key,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "examples" / "rl_loop.py"), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
