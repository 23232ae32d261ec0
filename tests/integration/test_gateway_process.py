"""`python -m paceline.services gateway` as a process: when it refuses to start, and how it ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from support.patience import PATIENCE
from support.stacks.gateway_stack import free_port

from paceline.gateway.v1 import gateway_service_pb2 as pb


@pytest.mark.parametrize(
    "flags", [["--credential", "c"], ["--keys-file", "keys.json"], ["--insecure", "--credential", "c"]]
)
def test_the_process_does_not_start_without_keys_and_credential(tmp_path, flags):
    ended = _gateway_process(tmp_path, flags)
    _, problem = ended.communicate(timeout=PATIENCE)
    assert ended.returncode == 1
    assert "insecure" in problem
    assert "Traceback" not in problem


async def test_the_process_serves_and_ends_on_sigterm(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    # Nothing listens at these addresses. At the default ones, services of another test run may.
    upstream = [flag for name in ("trainer", "samplers") for flag in (f"--{name}", f"127.0.0.1:{free_port()}")]
    process = _gateway_process(
        tmp_path, ["--insecure", "--listen", address, "--health-listen", "127.0.0.1:0", *upstream]
    )
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_unary("/paceline.gateway.v1.GatewayService/WhoAmI")
            reply = pb.WhoAmIResponse.FromString(await method(b"", wait_for_ready=True, timeout=PATIENCE))
        assert (reply.tenant, reply.key_name) == ("default", "")
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "stopped" in log


def _gateway_process(folder, flags) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in [*sys.path, str(Path.cwd())] if path)
    # Many systems let a process open only 1,024 files until it asks for more.
    command = [
        "sh",
        "-c",
        'ulimit -Sn 256; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "paceline.services",
        "gateway",
        *flags,
    ]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
