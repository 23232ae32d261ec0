"""Start services, watch their processes, restart those that die, give up those that keep dying, and stop them all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

from paceline.child import Child, adopt_orphans, end_orphans, reason_of_status
from paceline.rpc.health import wait_until_serving
from paceline.up.plan import CannotStart, Plan, without_settings

_MAX_FAILURES = 3
"""Consecutive deaths after which a service is given up."""
_STEADY_SECONDS = 10.0
"""How long a service must have been ready for its next death to count as the first."""
_RESTART_SECONDS = 1.0
BROKEN_STOP_SECONDS = 5.0
"""How long a service may take to stop if not all were ever ready, so that no caller was served."""
_KILL_SECONDS = 5.0
"""How long the kernel may take to end a killed process."""

_MAX_LOG_BYTES, _MAX_REASON = 1 << 20, 400
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^(?:\([^()]*\) *)?(?:ERROR|CRITICAL) [\d:. -]+\[[^\]]*\] ")
"""Prefix of the lines of vLLM's logs."""
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Refused|Exit|Interrupt)\b(?:: .+)?$")
_DETAIL = re.compile(r"^ +(?!File \")\S")
"""Line that pydantic writes below an error: its first problem."""
_NOISE = re.compile(r"^(?:\s|Traceback |During handling|The above exception|[^ ]*: \w*Warning: )")


class Supervisor:
    """Runs one process per plan, each writing directly to its own log file, independently of this process.

    `run` ends within `stop_seconds` + `_KILL_SECONDS` per service of the first signal, and immediately after a second.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        logs: Path,
        say: Callable[[str], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Report events line by line to `say`; call `on_ready` once when all services have been ready."""
        self._plans, self._logs, self._say, self._on_ready = plans, logs, say, on_ready
        self._running: dict[str, _ServiceProcess] = {}
        self._ready = {plan.name: asyncio.Event() for plan in plans}
        """Set once the service has been ready."""
        self._stopping, self._hurrying = asyncio.Event(), asyncio.Event()
        self._failure = ""
        self._max_failures_first = _MAX_FAILURES
        """Consecutive deaths after which a service is given up, until all services have been ready."""

    async def run(self, *, until_eof: bool = False) -> None:
        """Run the services until a signal arrives. Raises CannotStart if one is given up.

        With `until_eof`, the end of standard input also stops them. This is for callers that are programs: a service
        that ends before all have been ready is given up immediately, so that the caller is notified.
        """
        self._max_failures_first = 1 if until_eof else _MAX_FAILURES
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._stop)
        if until_eof:
            try:
                loop.add_reader(sys.stdin.fileno(), self._read_input)
            except PermissionError:  # A file, such as /dev/null: it cannot be waited for, and its end comes at once.
                self._stopping.set()
        keepers = [asyncio.create_task(self._keep(plan)) for plan in self._plans]
        stopping = asyncio.create_task(self._stopping.wait())
        # If a keeper ends first, its service failed: the others are stopped, then the error is raised.
        await asyncio.wait({stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        self._stopping.set()
        self._say("stopping")
        for plan in reversed(self._plans):
            await self._end(plan.name)
        await asyncio.gather(*keepers)
        self._say("stopped")
        if self._failure:
            raise CannotStart(self._failure)

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    def _read_input(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._stopping.set()

    async def _keep(self, plan: Plan) -> None:
        """Run one service until all are stopped or it is given up; restart it when it dies."""
        log = self._logs / f"{plan.name}.log"
        _keep_previous(log)
        failures = 0
        if plan.after:
            await self._until_ready(plan.after)
        while not self._stopping.is_set():
            service = self._running[plan.name] = _ServiceProcess.start(plan, log)
            ready_seconds = await self._watch(service)
            # What it left, such as vLLM's engine, may hold the memory or the port that its successor needs.
            if not await end_orphans(self._pids, _KILL_SECONDS):
                self._say(f"some processes that the {plan.name} started could not be killed")
            if self._stopping.is_set():
                return
            failures = 1 if ready_seconds >= _STEADY_SECONDS else failures + 1
            reason = f"{reason_of(await service.child.wait(), log, service.log_start)} (log: {log})"
            if failures >= (_MAX_FAILURES if self._all_ready else self._max_failures_first):
                often = f"ended {failures} times in a row" if failures > 1 else "could not be started"
                self._failure = f"the {plan.name} {often}: {reason}"
                self._stopping.set()
                return
            self._say(f"the {plan.name} ended and is restarted: {reason}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RESTART_SECONDS)

    @property
    def _all_ready(self) -> bool:
        """Whether every service has been ready."""
        return all(event.is_set() for event in self._ready.values())

    async def _until_ready(self, name: str) -> None:
        """Wait until a service has been ready or all are stopped."""
        waits = [asyncio.create_task(event.wait()) for event in (self._ready[name], self._stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _watch(self, service: _ServiceProcess) -> float:
        """Wait for a service to end; return how many seconds it was ready."""
        serving = asyncio.create_task(self._until_serving(service.plan))
        either: set[asyncio.Future[Any]] = {serving, service.child.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if service.child.ended.done():
            serving.cancel()
            return 0.0
        ready_at = monotonic()
        self._announce(service)
        await service.child.wait()
        return monotonic() - ready_at

    async def _until_serving(self, plan: Plan) -> None:
        ended = False

        def give_up() -> bool:
            return ended

        try:
            await asyncio.to_thread(wait_until_serving, plan.health, plan.service, give_up)
        finally:
            ended = True

    def _announce(self, service: _ServiceProcess) -> None:
        if self._stopping.is_set():
            return
        self._say(f"the {service.plan.name} is ready after {monotonic() - service.started:.0f} s")
        if not self._all_ready:
            self._ready[service.plan.name].set()
            if self._all_ready:
                self._on_ready()

    async def _end(self, name: str) -> None:
        """Stop one service; kill it if it takes too long."""
        service = self._running.get(name)
        if service is None or service.child.ended.done():
            return
        service.child.terminate()
        seconds = service.plan.stop_seconds if self._all_ready else BROKEN_STOP_SECONDS
        if not await service.child.ends_within(seconds, unless=self._hurrying):
            service.child.kill()
            await service.child.ends_within(_KILL_SECONDS)

    def _pids(self) -> set[int]:
        return {service.child.pid for service in self._running.values() if not service.child.ended.done()}


@dataclass(slots=True)
class _ServiceProcess:
    """A service's process."""

    plan: Plan
    child: Child
    log_start: int
    """Offset of its first line in the log."""
    started: float

    @classmethod
    def start(cls, plan: Plan, log: Path) -> _ServiceProcess:
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
            log_start = output.tell()
            child = Child.start(
                ["-m", "paceline.services", plan.module],
                environment={**without_settings(os.environ), **plan.environment},
                output=output.fileno(),
                own_session=True,  # Ctrl-C reaches only this process, which stops the services in order
            )
        if plan.cores:
            with suppress(ProcessLookupError):  # It has already ended; `_keep` handles that.
                os.sched_setaffinity(child.pid, plan.cores)
        return cls(plan, child, log_start, monotonic())


def _keep_previous(log: Path) -> None:
    """Rename the previous log, so that a new one is started."""
    if log.exists():
        log.replace(log.with_suffix(".previous.log"))


def reason_of(status: int, log: Path, start: int) -> str:
    """Return why a process ended with this status; `start` is the offset of its first line in the log.

    The first error for which the process, or a child of it, printed a traceback is the cause of later ones. Without a
    traceback, the reason is the last line that the process wrote.
    """
    if status < 0:
        return reason_of_status(status)
    if status == 0:
        return "it exited without an error, as after SIGTERM"
    with log.open("rb") as file:
        file.seek(start)
        text = file.read(_MAX_LOG_BYTES).decode(errors="replace")
    lines = [_PREFIX.sub("", _COLORS.sub("", line)).rstrip() for line in text.splitlines()]
    raised = [
        f"{line}: {after.strip()}" if _DETAIL.match(after) else line
        for line, after in pairwise([*lines, ""])
        if _RAISED.match(line)
    ]
    said = [line for line in lines if line and not _NOISE.match(line)]
    return (raised[:1] or said[-1:] or ["it wrote no output"])[0][:_MAX_REASON]
