"""Query a health port for a service's readiness, for probes that can only run a command.

    python -m paceline.rpc.health HOST:PORT [SERVICE]

Exit code 0: the service is ready. 1: it is not, or nothing answers. Without SERVICE, checks whether the process is
alive.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from threading import Event

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 3.0


def check_health(address: str, service: str, timeout_seconds: float) -> str:
    """Return a service's status from grpc.health.v1, or the status code of the failed call."""
    with grpc.insecure_channel(address) as channel:
        try:
            response = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=timeout_seconds)
        except grpc.RpcError as failure:
            code: grpc.StatusCode = failure.code()
            return code.name
    status: str = HealthCheckResponse.ServingStatus.Name(response.status)
    return status


def wait_until_serving(address: str, service: str, give_up: Callable[[], bool]) -> bool:
    """Poll until a service is ready. Return False if `give_up()` becomes true first."""
    pause = Event()
    while check_health(address, service, _PROBE_SECONDS) != "SERVING":
        if give_up():
            return False
        pause.wait(_POLL_SECONDS)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command-line interface."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.rpc.health", description="Probe a service's health port.", allow_abbrev=False
    )
    parser.add_argument("address", help="host:port of the health port, which is plaintext")
    parser.add_argument("service", nargs="?", default="", help="full name of a gRPC service; none means the process")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for the answer")
    given = parser.parse_args(arguments)
    status = check_health(given.address, given.service, given.timeout)
    if status != "SERVING":
        raise SystemExit(f"{given.service or 'process'} at {given.address}: {status}")


if __name__ == "__main__":
    main()
