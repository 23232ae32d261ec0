"""`paceline up`: the three services on one machine, each on its own cores or GPU, stopped together on Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.rpc.health import wait_until_serving
from paceline.up_plan import Plan, UpOptions, make_plans, read_or_make_key

_STOP_SECONDS = 30.0
_RESTART_SECONDS = 1.0
_COLORS = {"trainer": "cyan", "sampler": "magenta", "gateway": "green"}


def up(options: UpOptions) -> int:
    """Run the services until Ctrl-C or SIGTERM; return the exit status."""
    return asyncio.run(_Supervisor(options).run())


class _Supervisor:
    """Starts the services, shows their logs, starts again what dies, and stops them all."""

    def __init__(self, options: UpOptions) -> None:
        self._options = options
        state = Path(options.state).resolve()
        self._key_file = read_or_make_key(state)
        self._plans = make_plans(options, state)
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._stopping = asyncio.Event()
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        keepers = [asyncio.create_task(self._keep(plan)) for plan in self._plans]
        announcing = asyncio.create_task(self._announce())
        await self._stopping.wait()
        announcing.cancel()
        await self._stop_all([plan.name for plan in reversed(self._plans)])
        await asyncio.gather(*keepers)
        return 0

    async def _keep(self, plan: Plan) -> None:
        """Run one service until all are stopped; start it again when it dies."""
        while not self._stopping.is_set():
            status = await self._run_once(plan)
            if self._stopping.is_set():
                return
            self._say(plan.name, f"[red]ended with status {status}; starting again[/red]")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RESTART_SECONDS)

    async def _run_once(self, plan: Plan) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            plan.module,
            env={**_inherited_environment(), **plan.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes here alone; the services are told in order
        )
        if plan.cores:
            os.sched_setaffinity(process.pid, plan.cores)
        self._processes[plan.name] = process
        if process.stdout is None:
            raise RuntimeError("the service was started without a pipe")
        async for line in process.stdout:
            self._say(plan.name, escape(line.decode(errors="replace").rstrip()))
        return await process.wait()

    async def _stop_all(self, names: Sequence[str]) -> None:
        """Stop the services one after the other: first what calls, then what is called."""
        for name in names:
            process = self._processes.get(name)
            if process is None or process.returncode is not None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)

    async def _announce(self) -> None:
        """Say how to connect once all services are ready."""
        for plan in self._plans:
            if not await asyncio.to_thread(wait_until_serving, plan.health, plan.service, self._stopping.is_set):
                return
        self._console.rule("[bold]Paceline is up")
        self._console.print(f"  export PACELINE_ADDRESS={self._options.address}")
        self._console.print(f"  export PACELINE_API_KEY=$(cat {self._key_file})")
        self._console.rule("Ctrl-C stops all three services", style="dim")

    def _say(self, name: str, line: str) -> None:
        color = _COLORS[name]
        self._console.print(f"[{color}]{name:>8}[/{color}] │ {line}")


def _inherited_environment() -> dict[str, str]:
    """Return the environment without Paceline's own variables: each service gets the ones that are meant for it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
