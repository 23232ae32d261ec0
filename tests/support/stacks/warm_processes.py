"""Service processes that start in a fraction of a second, so that tests can start and kill many.

For each service, a fork server listens on a socket, imports the service's modules on the first request, and forks the
service on every request. The forks are the real programs, `python -m trainer_service` and the like, in processes of
their own; only the interpreter's start and the imports are shared. The trainer starts its engine as always, by
executing sys.executable, as it and the sampler start a member of a process group, and torch's launcher starts the
engine's ranks by PYTHON_EXEC. There, both are a script that requests a fork, passes signals on to it, and ends as the
fork ends. It runs client scripts and the workers of pytest-xdist in the same way.
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_path

VARIABLE = "WARM_PROCESSES"
"""Environment variable with the directory of the sockets, for the tests and the processes that they start."""

_ENGINE = "trainer_service.engine"
_LAUNCHER = "torch.distributed.run"
_MEMBER = "paceline.collective.member"
_BEHIND_STAND_INS = (_ENGINE, _LAUNCHER, _MEMBER)
"""Programs that services start. They and scripts are forked from the process of the trainer, which has torch."""
_WORKER = "worker"
"""The fork server of the workers of pytest-xdist."""
_WORKER_PROGRAM = "import sys;exec(eval(sys.stdin.readline()))"
"""The program with which pytest-xdist starts a worker."""
_RECORDER = "support.chaos.file_recorder"
_TESTS = str(Path(__file__).parents[2])
_IMPORTS = {
    "trainer_service": (
        "trainer_service.__main__",
        f"{_ENGINE}.__main__",
        _LAUNCHER,
        _MEMBER,
        _RECORDER,
        "grpc",
        "peft",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.tokenization_auto",
    ),
    "sampler_service": (
        "sampler_service.__main__",
        "sampler_service.engine.hf.engine",
        "sampler_service.engine.vllm.forks",
        "sampler_service.engine.vllm.cpu.lora",
        "setproctitle",
    ),
    "gateway": ("gateway.__main__", "gateway.http.edge"),
    _WORKER: (
        "fastapi",
        "grpc.aio",
        "openai",
        "peft",
        "pytest",
        "transformers.models.llama.modeling_llama",
        "vllm.v1.engine.async_llm",
    ),
}
"""What each fork server imports before the first fork."""


class WarmProcesses:
    """A client's view of the fork servers that listen in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "python"
        """The script that stands in for forks."""

    @staticmethod
    def at_hand(directory: Path) -> "WarmProcesses":
        """Return the fork servers that all tests share, or new ones in `directory` if there are none, as in a bench."""
        shared = os.environ.get(VARIABLE)
        return WarmProcesses(Path(shared)) if shared else OwnWarmProcesses(directory)

    def start(self, environment: dict[str, str], log: Path, program: str = "trainer_service") -> "WarmProcess":
        """Start a service."""
        return WarmProcess(_ask_for_service(self.directory, program, environment, log))

    def close(self) -> None:
        """End the fork servers if this object owns them."""


class OwnWarmProcesses(WarmProcesses):
    """The owner's view of the fork servers, which ends them.

    `collected` are the files and folders of the tests that workers will run. Their modules are imported once, before
    the first worker is forked.
    """

    def __init__(self, directory: Path, collected: Sequence[str] = ()) -> None:
        super().__init__(directory)
        self._collected = collected
        self.python.write_text(
            f"#!{sys.executable} -SE\nimport os, sys\n"
            "words = sys.argv[2:] if sys.argv[1:2] == ['-u'] else sys.argv[1:]\n"
            "program, *arguments = words[1:] if words[:1] == ['-m'] else words or ['']\n"
            f"is_worker = arguments == [{_WORKER_PROGRAM!r}]\n"
            f"is_forked = is_worker or program in {_BEHIND_STAND_INS!r} or program.endswith('.py')\n"
            f"if not is_forked:\n    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
            f"sys.path.insert(0, {_TESTS!r})\nfrom {__spec__.name} import stand_in\n"
            "stand_in(program, arguments)\n"
        )
        self.python.chmod(0o755)
        # The other end reads EOF when this process ends, for whatever reason.
        alive, self._alive = socket.socketpair()
        with alive:
            self._servers = [self._serve(name, alive.fileno()) for name in _IMPORTS]

    def close(self) -> None:
        self._alive.shutdown(socket.SHUT_RDWR)  # forks of this process hold it too, so closing it would not signal EOF
        self._alive.close()
        for server in self._servers:
            server.wait()

    def _serve(self, program: str, alive: int) -> subprocess.Popen:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.directory / f"{program}.sock"))
        listener.listen(64)
        with listener:
            descriptors = (listener.fileno(), alive)
            command = [sys.executable, "-m", __spec__.name, program, *map(str, descriptors)]
            command += self._collected if program == _WORKER else ()
            paths = os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")]))
            return subprocess.Popen(command, pass_fds=descriptors, env={**os.environ, "PYTHONPATH": paths})


def start_warm(directory: Path, program: str, environment: dict[str, str], log: Path) -> "WarmPopen":
    """Start a service with the fork servers of `directory`; its output is appended to `log`."""
    return WarmPopen(_ask_for_service(directory, program, environment, log))


class WarmProcess:
    """A forked service."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(64))
        self.returncode: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to finish its work and end."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within `seconds`."""
        return self._has_ended(seconds)

    def _has_ended(self, seconds: float | None) -> bool:
        if self.returncode is None:
            self._connection.settimeout(seconds)
            with suppress(TimeoutError, BlockingIOError):
                self.returncode = int(self._connection.recv(64))
        return self.returncode is not None

    def engines(self) -> list[int]:
        """Return the process ids of the engines, and the member of a process group, that were forked for it."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return [behind(pid) for pid in map(int, children) if behind(pid) != pid]
        except (FileNotFoundError, ProcessLookupError):  # one of them has just ended
            return []


class WarmPopen(WarmProcess):
    """A forked service with the methods of a Popen."""

    def poll(self) -> int | None:
        self._has_ended(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _ask_for_service(directory: Path, program: str, environment: dict[str, str], log: Path) -> socket.socket:
    request = _Request(program, [], {**environment, VARIABLE: str(directory)}, str(Path.cwd()))
    with log.open("ab") as file, Path(os.devnull).open() as nothing:
        return _ask(directory, program, request, (nothing.fileno(), file.fileno(), file.fileno()))


@dataclass(frozen=True)
class _Request:
    """A fork to make."""

    program: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    stand_in: int | None = None
    """Process id of the process that stands in for the fork."""


def _ask(directory: Path, server: str, request: _Request, files: tuple[int, int, int]) -> socket.socket:
    """Request a fork with these files as standard input, output and error."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(directory / f"{server}.sock"))
    message = json.dumps(vars(request)).encode()
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))])
    return connection


def _end_with_parent(alive: int, forks: set[int]) -> None:
    os.read(alive, 1)
    for pid in list(forks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _serve(program: str, listener: socket.socket, alive: int, collected: Sequence[str]) -> None:
    forks: set[int] = set()
    threading.Thread(target=_end_with_parent, args=(alive, forks), daemon=True).start()
    while True:
        connection, _ = listener.accept()
        received = _receive(connection)
        if received is None:
            connection.close()
            continue
        request, files = received
        for module in _IMPORTS[program]:
            import_module(module)
        if collected:
            import pytest

            pytest.main(["--collect-only", "-p", "no:terminal", *collected])
            collected = ()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            listener.close()
            connection.close()
            os.close(alive)
            _run(request, files)
        forks.add(pid)
        if request.program != _ENGINE:
            with suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)  # before the requester can kill the group
        for file in files:
            os.close(file)
        with suppress(OSError):  # the requester is gone; `_end_with` ends the fork
            connection.send(str(pid).encode())
        threading.Thread(target=_report, args=(connection, pid, forks), daemon=True).start()
        threading.Thread(target=_end_with, args=(connection, pid), daemon=True).start()


def _receive(connection: socket.socket) -> tuple[_Request, list[int]] | None:
    """Return the request and its files, or None if the requester is gone."""
    data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_LEN(16))
    files = array("i")
    for _, _, content in ancillary:
        files.frombytes(content)
    if not data:
        return None
    return _Request(**json.loads(data)), list(files)


def _report(connection: socket.socket, pid: int, forks: set[int]) -> None:
    _, status = os.waitpid(pid, 0)
    forks.discard(pid)
    with suppress(OSError):  # the requester is gone
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    connection.shutdown(socket.SHUT_RDWR)


def _end_with(connection: socket.socket, pid: int) -> None:
    """End the fork when its requester ends."""
    with suppress(OSError):
        while connection.recv(64):
            pass
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _run(request: _Request, files: list[int]) -> None:
    """Run the program in this fork."""
    program, environment = request.program, request.environment
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request.cwd)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    status = 1
    try:
        if recorder := sys.modules.get(_RECORDER):
            recorder.record_me()
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
            os.close(file)
        sys.argv = [program, *request.arguments]
        stand_in = str(WarmProcesses(Path(environment[VARIABLE])).python)
        if program in {"trainer_service", "sampler_service"}:
            sys.executable = stand_in
        elif program == _LAUNCHER:
            os.environ["PYTHON_EXEC"] = stand_in
        if request.stand_in is not None:
            os.getppid = partial(_parent_of, request.stand_in)  # ranks end when the launcher does
        _run_program(program, request.arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else bool(end.code)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_program(program: str, arguments: list[str]) -> None:
    """Run a worker of pytest-xdist, a script, or a module with a `main`."""
    if program == "-c":
        exec(arguments[0], {"__name__": "__main__"})
    elif program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        run_path(program, run_name="__main__")
    else:
        sys.modules.get(f"{program}.__main__", sys.modules[program]).main()
        return
    atexit._run_exitfuncs()


def behind(pid: int) -> int:
    """Return the process id of the fork that a process stands in for, or else the process's own."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name) if name.isdigit() else pid


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def stand_in(program: str, arguments: list[str]) -> None:
    """Stand in for a program that the parent of this process started."""
    directory = Path(os.environ[VARIABLE])
    request = _Request(program, arguments, dict(os.environ), str(Path.cwd()), os.getpid())
    connection = _ask(directory, _WORKER if program == "-c" else "trainer_service", request, (0, 1, 2))
    os.close(0)
    os.close(1)
    fork = int(connection.recv(64))
    Path("/proc/self/comm").write_text(str(fork))  # for `behind`
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: os.kill(fork, received))
    status = int(connection.recv(64) or 1)
    if status < 0:
        with suppress(OSError):  # SIGKILL cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    if sys.argv[1] in {"sampler_service", _WORKER}:
        # setproctitle overwrites the arguments and environment in place, and finds them only while they are unchanged.
        from setproctitle import setproctitle

        setproctitle(f"warm {sys.argv[1]}")
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), sys.argv[4:])
