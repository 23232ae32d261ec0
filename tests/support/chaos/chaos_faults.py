"""Faults of the chaos tests: kills, stops, full disks, flipped bits."""

import asyncio
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from support.ports import free_port, is_free
from support.stacks.warm_processes import WarmProcess, WarmProcesses
from trainer_service.failpoints import SERVICE_POINTS

ENGINE_POINTS = (
    "ForwardBackward",
    "OptimStep",
    "SaveState",
    "SaveState_written",
    "SaveAdapter",
    "SaveAdapter_written",
    "LoadState",
    "CreateRun",
)
_START_SECONDS = 120.0
_WATCHDOG_SECONDS = 300.0
"""A stopped engine must be replaced within this time."""
_STOP_SECONDS = 60.0
_ENGINE_STATUS = re.compile(r"engine process died with status (-?\d+)")
_TMPFS_BYTES = 512 << 20
_FILL_ATTEMPTS = 50


@dataclass
class Service:
    """One service, which can be restarted at the same address."""

    name: str
    module: str
    warm: WarmProcesses
    port: int
    environment: dict[str, str]
    log: Path
    abort: threading.Event
    """Set when something goes wrong, to end the killing."""
    process: WarmProcess | None = None
    victim: Path | None = None
    """A run whose files may be damaged while the service is down."""

    def start(self, **settings: str) -> WarmProcess:
        prefix = f"PACELINE_{self.name.upper()}_"
        extra = {prefix + name: value for name, value in settings.items() if value}
        self.process = self.warm.start({**self.environment, **extra}, self.log, self.module)
        return self.process

    @property
    def is_up(self) -> bool:
        return not is_free(self.port)


class Services:
    """Trainer, sampler and gateway with their default settings."""

    def __init__(self, directory: Path, volume: Path, model: Path, trainer: dict[str, str]) -> None:
        self.warm = WarmProcesses.at_hand(directory)
        (directory / "credential").write_text("credential of the services")
        self._directory = directory
        self._abort = threading.Event()
        ports = {name: free_port() for name in ("trainer", "sampler", "gateway")}
        address = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        base = {
            "MODEL": str(model),
            "DTYPE": "float32",
            "CHECKPOINT_DIR": str(volume),
            "STAGING_DIR": str(directory),
        }
        sampler = {**base, "ENGINE": "hf", "TRAINER": address["trainer"]}
        gateway = {"TRAINER": address["trainer"], "SAMPLERS": address["sampler"], "KEYS_FILE": f"{directory}/keys.json"}
        self.trainer = self._service("trainer", ports, {**base, "DEVICE": "cpu", **trainer})
        self.sampler = self._service("sampler", ports, sampler)
        self.gateway = self._service("gateway", ports, gateway)

    def _service(self, name: str, ports: dict[str, int], settings: dict[str, str]) -> Service:
        common = {
            "LISTEN": f"127.0.0.1:{ports[name]}",
            "HEALTH_LISTEN": f"127.0.0.1:{free_port()}",
            "CREDENTIAL_FILE": f"{self._directory}/credential",
            "LOG_LEVEL": "WARNING",
        }
        prefix = f"PACELINE_{name.upper()}_"
        environment = {prefix + key: value for key, value in {**common, **settings}.items()}
        module = name if name == "gateway" else f"{name}_service"
        environment |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        return Service(name, module, self.warm, ports[name], environment, self._directory / f"{name}.log", self._abort)

    def stop(self) -> None:
        for service in (self.gateway, self.sampler, self.trainer):
            if service.process is not None:
                service.process.stop()
                service.process.wait(60)

    def unexpected(self) -> list[str]:
        """Return the logs' lines that no fault explains: engines that ended by themselves, errors without a type.

        Prints what was logged before and after each.
        """
        found = []
        for service in (self.gateway, self.sampler, self.trainer):
            lines = service.log.read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                status = _ENGINE_STATUS.search(line)
                if "uncaught" in line or (status and int(status[1]) != -signal.SIGKILL):
                    found.append(f"{service.name} logged: {line[:500]}")
                    sys.stderr.write("\n".join(lines[max(number - 20, 0) : number + 20]) + "\n")
        return found

    def close(self) -> None:
        for service in (self.gateway, self.sampler, self.trainer):
            if service.process is not None and not service.process.wait(0):
                service.process.kill()
                service.process.wait(60)
        self.warm.close()


@dataclass
class Killer:
    """Kills one service repeatedly, sometimes while it starts, and stops it for a while."""

    service: Service
    kills_left: int
    seed: int
    stops: bool = False
    kills: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed} {self.service.name}")

    def run(self) -> None:
        """Kill the service `kills_left` times, then leave it running."""
        try:
            while self.kills.total() < self.kills_left and not self.service.abort.is_set():
                self.live_once()
        except BaseException:
            self.service.abort.set()
            raise
        self.service.start()

    def live_once(self) -> None:
        """Start the service and kill it, while it starts or some time later."""
        self.live_at_any_moment()

    def live_at_any_moment(self) -> None:
        process = self.service.start()
        if self.random.random() < 0.3:
            time.sleep(self.random.uniform(0.0, 1.0))
        else:
            self.wait_up(process)
            self.pause(process.pid)
            time.sleep(self.random.uniform(0.0, 3.0))
        self.end(process)

    def wait_up(self, process: WarmProcess) -> None:
        """Wait until the service listens. Raises AssertionError if it ends instead."""
        is_up = self.is_up_or_killed(process) and process.returncode is None
        assert is_up, self.ended_by_itself(process)

    def is_up_or_killed(self, process: WarmProcess) -> bool:
        """Wait until the service listens, or has ended by SIGKILL."""
        deadline = time.monotonic() + _START_SECONDS
        while not self.service.is_up:
            if process.wait(0.01):
                return process.returncode == -signal.SIGKILL
            assert time.monotonic() < deadline, f"{self.service.name} does not start"
        return True

    def end(self, process: WarmProcess) -> None:
        """Kill the service."""
        when = "at any moment" if self.service.is_up else "while it starts"
        self.kill(process)
        assert process.returncode == -signal.SIGKILL, self.ended_by_itself(process)
        self.kills[f"{self.service.name} {when}"] += 1

    @staticmethod
    def kill(process: WarmProcess) -> None:
        with suppress(ProcessLookupError):  # it ended just now; its status tells how
            process.kill()
        process.wait(60)

    def ended_by_itself(self, process: WarmProcess) -> str:
        """Return the message for a service that ended without being killed."""
        log = self.service.log.read_text()[-3000:]
        return f"{self.service.name} ended by itself with status {process.returncode}: {log}"

    def pause(self, pid: int) -> None:
        """Stop a process for a while."""
        if self.stops and self.random.random() < 0.3:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.random.uniform(0.0, 2.0))
                os.kill(pid, signal.SIGCONT)
                self.notes[f"{self.service.name} stopped"] += 1


class TrainerKiller(Killer):
    """Kills the trainer and its engine at failpoints and at any moment, even during recovery."""

    def __init__(self, services: Services, kills: int, seed: int, *, stops: bool) -> None:
        super().__init__(services.trainer, kills, seed, stops)
        self.damaged: set[str] = set()
        """The runs in whose files a bit was flipped."""

    def live_once(self) -> None:
        self._damage()
        lives = (
            self._live_to_a_point,
            self._live_to_an_engine_point,
            self.live_at_any_moment,
            self._outlive_the_engine,
        )
        self.random.choices(lives, (5, 2, 2, 2))[0]()

    def _live_to_a_point(self) -> None:
        """Start a trainer that dies at a failpoint; kill it if it does not get there."""
        name = self.random.choice(SERVICE_POINTS)
        process = self._start(name)
        assert self.is_up_or_killed(process), self.ended_by_itself(process)
        if process.returncode is None:
            self.pause(process.pid)
            if not process.wait(self.random.uniform(0.0, 3.0)):
                self.end(process)
                return
        assert process.returncode == -signal.SIGKILL, self.ended_by_itself(process)
        self.kills[name] += 1

    def _live_to_an_engine_point(self) -> None:
        """Start a trainer whose engine dies at a failpoint; kill the trainer later."""
        name = f"engine_{self.random.choice(ENGINE_POINTS)}"
        process = self._start(name)
        engines = self._engines(process)
        self.wait_up(process)
        self.pause(process.pid)
        if self._are_replaced(process, engines, self.random.uniform(0.0, 3.0)):
            self.kills[name] += 1
            time.sleep(self.random.uniform(0.0, 1.0))
        self.end(process)

    def _outlive_the_engine(self) -> None:
        """Kill the engine, or stop it for good; kill the trainer later."""
        process = self.service.start()
        self.wait_up(process)
        self.pause(process.pid)
        time.sleep(self.random.uniform(0.0, 1.0))
        engines = self._engines(process)
        is_stopped = self.stops and self.random.random() < 0.1
        self._signal(engines, signal.SIGSTOP if is_stopped else signal.SIGKILL)
        self.notes["engine stopped for good"] += is_stopped
        patience = _WATCHDOG_SECONDS if is_stopped else _START_SECONDS
        assert self._are_replaced(process, engines, patience), "a stopped or killed engine is not replaced"
        self.kills["engine at any moment"] += 1
        time.sleep(self.random.uniform(0.0, 1.0))
        self.end(process)

    def _lose_the_first_engine(self) -> None:
        """Kill the engine while the trainer starts: the trainer ends with an error, unless it is up by then."""
        process = self.service.start()
        engines = self._engines(process)
        time.sleep(self.random.uniform(0.0, 1.0))
        self._signal(engines, signal.SIGKILL)
        self.kills["engine while the trainer starts"] += 1
        deadline = time.monotonic() + _START_SECONDS
        while not process.wait(0.02):
            if self.service.is_up:
                self.end(process)
                return
            assert time.monotonic() < deadline, "the trainer neither starts nor ends"
        assert process.returncode == 1, self.ended_by_itself(process)

    @staticmethod
    def _signal(engines: list[int], number: signal.Signals) -> None:
        for pid in engines:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, process: WarmProcess) -> None:
        """Kill the trainer, or tell it to stop; half of the time, kill it then while it drains and saves its runs."""
        if not self.service.is_up or self.random.random() < 0.8:
            super().end(process)
            return
        with suppress(ProcessLookupError):  # its failpoint was faster
            process.stop()
        patience = self.random.uniform(0.0, 2.0) if self.random.random() < 0.5 else _STOP_SECONDS
        if not process.wait(patience):
            assert patience < _STOP_SECONDS, "the trainer does not stop"
            self.kill(process)
        assert process.returncode in {0, -signal.SIGKILL}, self.ended_by_itself(process)
        if process.returncode:
            self.kills["trainer while it stops"] += 1
        else:
            self.notes["trainer stopped by itself when told to"] += 1

    def _start(self, point: str) -> WarmProcess:
        return self.service.start(FAILPOINTS=f"{point}:{self.random.randint(1, 8)}")

    def _engines(self, process: WarmProcess) -> list[int]:
        """Wait for the trainer's engine; return its process ids."""
        deadline = time.monotonic() + _START_SECONDS
        while not (engines := process.engines()):
            assert not process.wait(0.01), self.ended_by_itself(process)
            assert time.monotonic() < deadline, "the trainer starts no engine"
        return engines

    def _are_replaced(self, process: WarmProcess, engines: list[int], seconds: float) -> bool:
        """Whether the engine ends, and another may take its place, within `seconds`."""
        deadline = time.monotonic() + seconds
        while process.engines() == engines:
            assert not process.wait(0.02), self.ended_by_itself(process)
            if time.monotonic() > deadline:
                return False
        return True

    def _damage(self) -> None:
        if self.service.victim is not None and self.random.random() < 0.3:
            file = flip_bit(self.service.victim, self.random)
            if file:
                self.damaged.add(self.service.victim.name)
                self.notes[f"bit flipped in {file}"] += 1


def flip_bit(run: Path, random: Random) -> str:
    """Flip a bit in one of a run's files; return the kind of file, or an empty string if there is none."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return ""
    file = random.choice(files)
    place = random.randrange(file.stat().st_size)
    with file.open("r+b") as content:
        content.seek(place)
        byte = content.read(1)[0]
        content.seek(place)
        content.write(bytes([byte ^ 1 << random.randrange(8)]))
    return "/".join(part for part in file.relative_to(run).parts if not part.isdigit())


class FullDisk:
    """A checkpoint volume that is full at times.

    Where mounting is allowed, it is a file system of its own that gets filled. Otherwise the size of the files that the
    trainer and its engine may write is limited for a while: a write beyond the limit fails as on a full disk.
    """

    def __init__(self, volume: Path) -> None:
        volume.mkdir()
        self._volume = volume
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "chaos", str(volume)],
            capture_output=True,
            check=False,
        )
        self.is_mounted = mounted.returncode == 0
        self._filler = volume / "filler"
        self._filling: asyncio.Future[None] | None = None

    def begin(self, services: Services, random: Random, notes: Counter, is_over: Callable[[], bool]) -> None:
        def run() -> None:
            while not is_over():
                time.sleep(random.uniform(1.0, 6.0))
                seconds = random.uniform(0.2, 1.5)
                if self.is_mounted:
                    notes["disk full"] += self._fill(random, seconds)
                else:
                    notes["files limited, as mounting is not allowed"] += 1
                    self._limit(services, random.choice((0, 4096, 65536)), seconds)

        self._filling = asyncio.ensure_future(asyncio.to_thread(run))

    async def end(self) -> None:
        """Wait until the disk has free space again. Raises what ended the filling."""
        if self._filling is not None:
            await self._filling

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self._volume)], check=True)

    def _fill(self, random: Random, seconds: float) -> bool:
        """Leave less space than must stay free, or none; return whether that was achieved."""
        spare = random.choice((0, 64 << 20))
        with self._filler.open("wb") as file:
            is_full = any(self._take(file.fileno(), spare) for _ in range(_FILL_ATTEMPTS))
            if is_full:
                time.sleep(seconds)
        self._filler.unlink()
        return is_full

    def _take(self, file: int, spare: int) -> bool:
        size = shutil.disk_usage(self._volume).free - spare
        try:
            os.posix_fallocate(file, 0, max(size, 1))
        except OSError:  # others wrote meanwhile
            return False
        return True

    @staticmethod
    def _limit(services: Services, size: int, seconds: float) -> None:
        trainer = services.trainer.process
        pids = [trainer.pid, *trainer.engines()] if trainer is not None else []
        for limit in (size, resource.RLIM_INFINITY):
            for pid in pids:
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            time.sleep(seconds)
