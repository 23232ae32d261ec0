"""`make demo`: start the three services with the embedded model, train it by reinforcement learning, stop them.

On a terminal, the services stay until you have talked to what was trained.

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

import paceline
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
                if code == 0:
                    offer_chat(console, services, model)
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
    return run(services, str(ROOT / "examples" / "rl_loop.py"), *arguments)


def offer_chat(console: Console, services: LocalServices, model: Path) -> None:
    """Talk to the adapter that was trained; without a terminal, only say how."""
    with paceline.ServiceClient(services.address, services.api_key) as service:
        adapter = service.list_checkpoints(kind=paceline.CheckpointKind.SAMPLER)[0].path
    chat = ["chat", "--model", adapter]
    if not sys.stdin.isatty():
        again = f"paceline up --model {model} --state {STATE}"
        talk = f"paceline {' '.join(chat)} --api-key-file {STATE / 'api_key'}"
        console.print(f"to talk to it: {again}\nand in another terminal: {talk}", highlight=False, soft_wrap=True)
        return
    console.print("Talk to what was trained; /exit ends, and stops the services.")
    run(services, "-m", "paceline.cli", *chat)


def run(services: LocalServices, *arguments: str) -> int:
    """Run Python as a client of the services; return its exit status."""
    environment = {
        **os.environ,
        "PACELINE_ADDRESS": services.address,
        "PACELINE_API_KEY": services.api_key,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
