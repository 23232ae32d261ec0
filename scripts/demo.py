"""`make demo`: start the three services with the embedded model, train it by reinforcement learning, stop them.

python scripts/demo.py [options of examples/rl_loop.py]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from time import perf_counter

from make_model import default_directory, make_model
from rich.console import Console

from paceline.rpc.health import check_health

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".paceline" / "demo"
ADDRESS = "127.0.0.1:50250"
HEALTH = {
    "trainer": ("127.0.0.1:50351", "paceline.trainer.v1.TrainerService"),
    "sampler": ("127.0.0.1:50352", "paceline.sampler.v1.SamplerService"),
    "gateway": ("127.0.0.1:50350", "paceline.gateway.v1.GatewayService"),
}
START_SECONDS = 300.0


def main(arguments: list[str]) -> int:
    """Run the demo; return the exit status of the loop."""
    console, start = Console(), perf_counter()
    with console.status("making the embedded model (once)"):
        model = make_model(default_directory())
    STATE.mkdir(parents=True, exist_ok=True)
    log = STATE / "services.log"
    with log.open("wb") as output:
        services = start_services(model, output)
        try:
            wait_until_ready(console, services, log)
            console.print(f"three services are up after {perf_counter() - start:.0f} s; their logs: {log}")
            status = run_loop(arguments)
        finally:
            services.send_signal(signal.SIGINT)
            services.wait()
    console.print(f"done in {perf_counter() - start:.0f} s")
    return status


def start_services(model: Path, output: object) -> subprocess.Popen[bytes]:
    """Start `paceline up` in a session of its own, so that Ctrl-C reaches it through this script alone."""
    command = [sys.executable, "-m", "paceline.cli", "up", f"--model={model}", f"--state={STATE}"]
    options = [f"--address={ADDRESS}", "--max-lora-rank=16"]
    return subprocess.Popen([*command, *options], stdout=output, stderr=output, cwd=ROOT, start_new_session=True)


def wait_until_ready(console: Console, services: subprocess.Popen[bytes], log: Path) -> None:
    """Return when all three services are ready; exit with the log's end when they will not be."""
    deadline = perf_counter() + START_SECONDS
    for name, (address, service) in HEALTH.items():
        with console.status(f"starting the {name}"):
            while check_health(address, service, 1.0) != "SERVING":
                if services.poll() is not None or perf_counter() > deadline:
                    sys.stderr.write(log.read_text(errors="replace")[-4000:])
                    raise SystemExit(f"the {name} did not start; its log is {log}")
                Event().wait(0.2)


def run_loop(arguments: list[str]) -> int:
    """Run examples/rl_loop.py against the services."""
    environment = {
        **os.environ,
        "PACELINE_ADDRESS": ADDRESS,
        "PACELINE_API_KEY": (STATE / "api_key").read_text().strip(),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "examples" / "rl_loop.py"), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
