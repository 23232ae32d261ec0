"""Run the three services as a child process: for scripts, benches and notebooks.

::

    with local_services(UpOptions(model="..."), Path("services.log")) as services:
        client = paceline.ServiceClient(services.address, services.api_key)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import IO

from paceline.up.plan import CannotStart, UpOptions, read_or_make_key, stop_seconds
from paceline.up.run import UP

_START_SECONDS = 1200.0
_END_SECONDS = 30.0
"""How much longer than its services `paceline up` may take to stop: processes that it kills end, too."""


@dataclass(frozen=True, slots=True)
class LocalServices:
    """How to reach the services."""

    address: str
    api_key: str


@contextmanager
def local_services(
    options: UpOptions, log: Path, on_line: Callable[[str], object] = lambda _: None
) -> Iterator[LocalServices]:
    """Run `paceline up` until the block or this process ends; write its output to `log`.

    `on_line` is called with each line of output until all services are ready. Raises CannotStart, with the reason, if
    they do not start.
    """
    key_file = read_or_make_key(Path(options.state).resolve())
    flags = [f"--{field.name.replace('_', '-')}={getattr(options, field.name)}" for field in fields(options)]
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "paceline.cli", "up", "--until-eof", *flags]
    pipe = subprocess.PIPE
    # In its own session, so that Ctrl-C reaches it only through this process; its stdin closes when this process ends.
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_until_up(_follow(process, log), on_line)
        yield LocalServices(options.address, key_file.read_text().strip())
    finally:
        services_stop = sum(stop_seconds(name, os.environ) for name in ("gateway", "sampler", "trainer"))
        _stop(process, services_stop + _END_SECONDS)


def _follow(process: subprocess.Popen[bytes], log: Path) -> SimpleQueue[str | None]:
    """Copy a process's output to a file and return its lines as a queue; None marks the end."""
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read(output: IO[bytes]) -> None:
        with log.open("wb", buffering=0) as file:
            for line in output:
                file.write(line)
                lines.put(line.decode(errors="replace").rstrip())
        lines.put(None)

    if process.stdout is None:
        raise RuntimeError("the process was started without a pipe")
    Thread(target=read, args=(process.stdout,), daemon=True).start()
    return lines


def _wait_until_up(lines: SimpleQueue[str | None], on_line: Callable[[str], object]) -> None:
    deadline, last_line = monotonic() + _START_SECONDS, ""
    while not last_line.startswith(UP):
        try:
            line = lines.get(timeout=max(0.0, deadline - monotonic()))
        except Empty:
            raise CannotStart(f"not ready after {_START_SECONDS:.0f} s; the last line was: {last_line}") from None
        if line is None:
            raise CannotStart(last_line or "`paceline up` ended without any output")
        last_line = line
        on_line(last_line)


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
