"""A service for the tests of `paceline up`. TOY_DOES lists what it does, separated by commas.

serves: opens the health port TOY_HEALTH, ready. leaves: starts a process that outlives it, in its own session but with
the same output, and appends the process's id to TOY_PIDS. stubborn: ignores SIGTERM. breaks: fails to import.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> None:
    does = os.environ["TOY_DOES"].split(",")
    sys.stderr.write("a first line\n")
    if "leaves" in does:
        left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        with Path(os.environ["TOY_PIDS"]).open("a") as file:
            file.write(f"{left.pid}\n")
    if "stubborn" in does:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "breaks" in does:
        raise ImportError("libcudnn.so.9: cannot open shared object file")
    serve(os.environ["TOY_HEALTH"])


def serve(address: str) -> None:
    import grpc
    from grpc_health.v1.health import HealthServicer
    from grpc_health.v1.health_pb2 import HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

    server, servicer = grpc.server(ThreadPoolExecutor(2)), HealthServicer()
    servicer.set("toy", HealthCheckResponse.SERVING)
    add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
