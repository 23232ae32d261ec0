"""Trainer processes that start in a fraction of a second, so that a test can kill many.

A process that has imported everything waits at a socket and forks the service or its engine when asked. They are the
real programs, `python -m trainer_service` and `python -m trainer_service.engine`, in processes of their own; only the
interpreter's start and the imports are shared. The service starts its engine as always, by executing sys.executable:
that is a script here, which asks for a fork and ends as the fork ends.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from contextlib import suppress
from pathlib import Path

_VARIABLE = "WARM_PROCESSES_SOCKET"


class WarmProcesses:
    """The forking process, as a test holds it."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "warm.sock")
        stand_in = directory / "warm.sock.python"
        here = str(Path(__file__).parent)
        stand_in.write_text(
            f"#!{sys.executable} -SE\nimport sys\nsys.path.insert(0, {here!r})\n"
            "from warm_processes import stand_in\nstand_in(int(sys.argv[-1]))\n"
        )
        stand_in.chmod(0o755)
        ready_read, ready_write = os.pipe()
        alive_read, self._alive = os.pipe()  # closed when this process ends, whatever ends it
        self._server = subprocess.Popen(
            [sys.executable, __file__, "serve", self.path, str(ready_write), str(alive_read)],
            pass_fds=[ready_write, alive_read],
        )
        os.close(ready_write)
        os.close(alive_read)
        assert os.read(ready_read, 1) == b"1"

    def start(self, environment: dict[str, str], log: Path) -> "WarmProcess":
        """Start the service."""
        with log.open("ab") as file:
            return WarmProcess(_ask(self.path, "service", {**environment, _VARIABLE: self.path}, [file.fileno()]))

    def close(self) -> None:
        os.close(self._alive)
        self._server.wait()


class WarmProcess:
    """A forked service."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(64))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Have it finish what it does, and end."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within `seconds`."""
        self._connection.settimeout(seconds)
        try:
            return bool(self._connection.recv(64))
        except TimeoutError:
            return False

    def engines(self) -> list[int]:
        """Process ids of what it started."""
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except FileNotFoundError:
            return []


def _ask(path: str, kind: str, environment: dict[str, str], files: list[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    message = json.dumps({"kind": kind, "environment": environment, "cwd": str(Path.cwd())}).encode()
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))])
    return connection


def _end_with_parent(alive: int, forks: set[int]) -> None:
    os.read(alive, 1)
    for pid in list(forks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _serve(path: str, ready: int, alive: int) -> None:
    import file_recorder  # noqa: F401
    import grpc  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import trainer_service.__main__
    import trainer_service.engine.__main__  # noqa: F401

    torch.set_num_threads(1)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    os.write(ready, b"1")
    forks: set[int] = set()
    threading.Thread(target=_end_with_parent, args=(alive, forks), daemon=True).start()
    while True:
        connection, _ = listener.accept()
        message, files = _receive(connection)
        pid = os.fork()
        if pid == 0:
            listener.close()
            connection.close()
            os.close(alive)
            _run(message, files)
        forks.add(pid)
        for file in files:
            os.close(file)
        connection.send(str(pid).encode())
        threading.Thread(target=_report, args=(connection, pid, forks), daemon=True).start()
        threading.Thread(target=_end_with, args=(connection, pid), daemon=True).start()


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_LEN(16))
    files = array("i")
    for _, _, content in ancillary:
        files.frombytes(content)
    return json.loads(data), list(files)


def _report(connection: socket.socket, pid: int, forks: set[int]) -> None:
    _, status = os.waitpid(pid, 0)
    forks.discard(pid)
    with suppress(OSError):  # whoever asked is gone
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    connection.shutdown(socket.SHUT_RDWR)


def _end_with(connection: socket.socket, pid: int) -> None:
    """End the fork when whoever asked for it ends."""
    with suppress(OSError):
        while connection.recv(64):
            pass
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _run(message: dict, files: list[int]) -> None:
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["cwd"])
    status = 1
    try:
        sys.modules["file_recorder"].record_me()
        if message["kind"] == "service":
            os.dup2(files[0], 1)
            os.dup2(files[0], 2)
            sys.executable = os.environ[_VARIABLE] + ".python"
            sys.argv = ["trainer_service"]
            sys.modules["trainer_service.__main__"].main()
        else:
            os.dup2(files[1], 2)
            sys.argv = ["trainer_service.engine", "--fd", str(files[0])]
            sys.modules["trainer_service.engine.__main__"].main()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def stand_in(descriptor: int) -> None:
    """Be the engine for the service that started this process."""
    connection = _ask(os.environ[_VARIABLE], "engine", dict(os.environ), [descriptor, 2])
    os.close(descriptor)
    connection.recv(64)
    status = int(connection.recv(64) or 1)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    _serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
