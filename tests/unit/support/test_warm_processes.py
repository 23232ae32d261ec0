"""The servers that tests fork services from."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from array import array
from pathlib import Path

from support.stacks.warm_processes import VARIABLE, WarmProcesses


def leave(warm: WarmProcesses, message: bytes, *files: int) -> None:
    """Ask for a fork, and be gone before it is made."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(warm.directory / "trainer_service.sock"))
        if message:
            connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))])


def test_a_requester_that_leaves_does_not_end_the_server(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    warm = WarmProcesses(Path(os.environ[VARIABLE]))
    request = {"program": str(script), "arguments": [], "environment": dict(os.environ), "cwd": str(tmp_path)}
    with Path(os.devnull).open("r+") as nothing:
        leave(warm, json.dumps(request).encode(), *[nothing.fileno()] * 3)
    leave(warm, b"")
    ended = subprocess.run([str(warm.python), str(script)], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("ran\n", 0)
