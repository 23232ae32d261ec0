"""Faults of the chaos tests: kills, stops, full disks, flipped bits."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
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
_TMPFS_BYTES = 512 << 20


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
        process = self.service.start()
        while_starting = self.random.random() < 0.3
        if while_starting:
            time.sleep(self.random.uniform(0.0, 0.5))
        else:
            self.wait_up(process)
            self.pause(process.pid)
            time.sleep(self.random.uniform(0.0, 3.0))
        if process.wait(0):
            raise self.ended_by_itself()
        process.kill()
        process.wait(60)
        self.kills[f"{self.service.name} {'while it starts' if while_starting else 'at any moment'}"] += 1

    def wait_up(self, process: WarmProcess) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self.service.is_up:
            if process.wait(0.01):
                raise self.ended_by_itself()
            assert time.monotonic() < deadline, f"{self.service.name} does not start"

    def ended_by_itself(self) -> AssertionError:
        """Return the error for a service that ended without being killed."""
        return AssertionError(f"{self.service.name} ended by itself: {self.service.log.read_text()[-3000:]}")

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

    def live_once(self) -> None:
        self._damage()
        kind = self.random.choices(("point", "engine point", "moment", "engine moment"), (5, 2, 2, 2))[0]
        name = {
            "point": self.random.choice(SERVICE_POINTS),
            "engine point": f"engine_{self.random.choice(ENGINE_POINTS)}",
        }.get(kind, "")
        process = self.service.start(FAILPOINTS=f"{name}:{self.random.randint(1, 8)}" if name else "")
        life = self.random.uniform(0.0, 3.0)
        deadline, is_up, engine = time.monotonic() + _START_SECONDS, False, kind.startswith("engine")
        first: list[int] = []
        patience = 0.0
        while not process.wait(0.02):
            first = first or process.engines()
            if not is_up and self.service.is_up:
                is_up, deadline = True, time.monotonic() + life
                self.pause(process.pid)
                if kind == "engine moment":
                    patience = self._end_engine(process)
                    deadline += patience
            if engine and first and process.engines() != first:
                self.kills[name or "engine at any moment"] += 1
                engine, first = False, [0]
                if is_up:
                    deadline = time.monotonic() + self.random.uniform(0.0, 1.0)
            if time.monotonic() > deadline:
                assert is_up, "the trainer does not start"
                assert not (patience and engine), "a stopped engine is not replaced"
                try:
                    is_told = not name and self.random.random() < 0.4
                    self._tell_to_stop(process) if is_told else process.kill()
                except ProcessLookupError:  # its failpoint was faster; the next `wait` reports that
                    continue
                process.wait(60)
                self.kills["trainer told to stop" if is_told else "trainer at any moment"] += 1
                return
        if not name:
            raise self.ended_by_itself()
        self.kills[name] += 1

    def _tell_to_stop(self, process: WarmProcess) -> None:
        """Send SIGTERM; half of the time, kill the trainer while it drains and saves its runs."""
        process.stop()
        patience = self.random.uniform(0.0, 2.0) if self.random.random() < 0.5 else _STOP_SECONDS
        if process.wait(patience):
            self.notes["trainer stopped by itself when told to"] += 1
            return
        assert patience < _STOP_SECONDS, "the trainer does not stop"
        with suppress(ProcessLookupError):  # it stopped just now
            process.kill()

    def _end_engine(self, process: WarmProcess) -> float:
        """Kill the engine, or stop it for good; return how many seconds its replacement may take."""
        time.sleep(self.random.uniform(0.0, 1.0))
        is_stopped = self.stops and self.random.random() < 0.1
        for pid in process.engines():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)
        self.notes["engine stopped for good"] += is_stopped
        return _WATCHDOG_SECONDS if is_stopped else 0.0

    def _damage(self) -> None:
        if self.service.victim is not None and self.random.random() < 0.3:
            file = flip_bit(self.service.victim, self.random)
            self.notes[f"bit flipped in {file}"] += bool(file)


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
        self._thread: threading.Thread | None = None

    def begin(self, services: Services, random: Random, notes: Counter, is_over: Callable[[], bool]) -> None:
        def run() -> None:
            while not is_over():
                time.sleep(random.uniform(1.0, 6.0))
                seconds = random.uniform(0.2, 1.5)
                if self.is_mounted:
                    notes["disk full"] += 1
                    self._fill(random, seconds)
                else:
                    notes["files limited, as mounting is not allowed"] += 1
                    self._limit(services, random.choice((0, 4096, 65536)), seconds)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    async def end(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self._volume)], check=True)

    def _fill(self, random: Random, seconds: float) -> None:
        """Leave less room than must stay free, or none."""
        with self._filler.open("wb") as file:
            room = shutil.disk_usage(self._volume).free - random.choice((0, 64 << 20))
            with suppress(OSError):  # others write at the same time
                os.posix_fallocate(file.fileno(), 0, max(room, 1))
            time.sleep(seconds)
        self._filler.unlink()

    @staticmethod
    def _limit(services: Services, size: int, seconds: float) -> None:
        trainer = services.trainer.process
        pids = [trainer.pid, *trainer.engines()] if trainer is not None else []
        for limit in (size, resource.RLIM_INFINITY):
            for pid in pids:
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            time.sleep(seconds)
