"""Measure what gRPC's defences cost bursts of the client's calls, and what they save in a flood of reset calls.

    python -m bench.hostile.resets [--clients 1 4] [--rounds 5] [--resets 50000]

A gateway answers WhoAmI in front of services that do nothing, in a process of its own, with its options and with gRPC's
defences off: no overload protection, and a queue of 100,000 calls. A burst is as many calls as a client keeps
in flight (500), from each of the clients at the same moment. In the flood one connection without a key starts calls and
resets each at once, while a client makes one call after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import grpc
import numpy as np
from support.fuzz.floods import flood_of_resets, watching
from support.stacks.gateway_stack import bearer, stack

from paceline.client.service_client import MAX_IN_FLIGHT
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceStub
from paceline.log import configure_logging
from paceline.rpc import server
from paceline.rpc.channel import open_channel
from paceline.rpc.port_limits import service_options

_METHOD = "/paceline.gateway.v1.GatewayService/WhoAmI"
_OFF = {
    "grpc.http.overload_protection": 0,
    "grpc.server.max_pending_requests": 100_000,
    "grpc.server.max_pending_requests_hard_limit": 100_000,
}


def main() -> None:
    """Measure both settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resets", type=int, default=50_000)
    parser.add_argument("--serve", choices=("on", "off"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(defended=options.serve == "on"))
        return
    for defences in ("on", "off"):
        command = [sys.executable, "-m", "bench.hostile.resets", "--serve", defences]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port, key = json.loads(process.stdout.readline())
            for clients in options.clients:
                speeds, codes = asyncio.run(bursts(port, key, clients, options.rounds))
                text = ", ".join(f"{code} {count}" for code, count in codes.items())
                print(
                    f"defences {defences}: {clients} x {MAX_IN_FLIGHT} calls, {np.median(speeds):.0f} a second; {text}"
                )
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = partial(GatewayServiceStub(channel).WhoAmI, pb.WhoAmIRequest(), metadata=(bearer(key),))
                with watching(process.pid, call) as watched:
                    flood_of_resets(port, _METHOD, options.resets)
            print(
                f"defences {defences}: {options.resets} resets: memory +{watched.grown >> 20} MiB, calls of another "
                f"client {1e3 * watched.idle:.0f} ms idle, at most {1e3 * max(watched.waits):.0f} ms"
            )
            process.terminate()


async def bursts(port: int, key: str, clients: int, rounds: int) -> tuple[list[float], Counter[str]]:
    """Return the calls per second of each burst but the first, and how the calls ended."""
    channels = [open_channel(f"127.0.0.1:{port}") for _ in range(clients)]
    codes, speeds = Counter[str](), list[float]()

    async def call(channel: grpc.aio.Channel) -> str:
        try:
            await GatewayServiceStub(channel).WhoAmI(pb.WhoAmIRequest(), metadata=(bearer(key),))
        except grpc.aio.AioRpcError as failure:
            return failure.code().name
        return "OK"

    for _ in range(rounds + 1):
        began = time.perf_counter()
        codes.update(await asyncio.gather(*(call(one) for one in channels for _ in range(MAX_IN_FLIGHT))))
        speeds.append(clients * MAX_IN_FLIGHT / (time.perf_counter() - began))
    for channel in channels:
        await channel.close()
    return speeds[1:], codes


async def serve(*, defended: bool) -> None:
    """Serve until terminated; print the port and a key."""
    configure_logging("gateway", "ERROR", "json")
    off = lambda settings: tuple({**dict(service_options(settings)), **_OFF}.items())  # noqa: E731
    options = patch.object(server, "service_options", service_options if defended else off)
    with options, TemporaryDirectory() as folder:
        async with stack(Path(folder), max_queued_per_tenant=100_000) as up:
            print(json.dumps([int(up.client.address.rpartition(":")[2]), up.key]), flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    main()
