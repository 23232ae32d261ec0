"""The real services as processes that tests start, kill and restart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from paceline.rpc.health import wait_until_serving
from paceline.rpc.identity import peer_metadata
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.up.plan import Plan, UpOptions, make_plans, read_or_make_key
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from support.patience import PATIENCE
from support.ports import free_service_ports
from support.stacks.warm_processes import VARIABLE, WarmPopen, behind, start_warm


@dataclass
class ServiceProcess:
    """One service of a cluster."""

    plan: Plan
    log: Path
    process: subprocess.Popen | WarmPopen | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        environment |= self.plan.environment
        if warm := environment.get(VARIABLE):
            self.process = start_warm(Path(warm), self.plan.module, environment, self.log)
        else:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "paceline.services", self.plan.module],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        if self.plan.cores:
            os.sched_setaffinity(self.process.pid, self.plan.cores)

    def engines(self) -> list[int]:
        """Return the ids of the processes that it started."""
        pid = self.process.pid
        return [behind(int(child)) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill_engine(self) -> None:
        """Kill the processes that it started."""
        for pid in self.engines():
            os.kill(pid, signal.SIGKILL)

    def wait_ready(self, *others: ServiceProcess) -> None:
        """Wait until it is ready; fail if it, or one of `others`, which it may wait for, has ended."""
        deadline = time.monotonic() + PATIENCE

        def is_over() -> bool:
            return any(one.process.poll() is not None for one in (self, *others)) or time.monotonic() > deadline

        if not wait_until_serving(self.plan.health, self.plan.service, is_over):
            ends = [f"{one.plan.name} ({one.process.poll()}):\n{one.tail()}" for one in (self, *others)]
            raise AssertionError(f"{self.plan.name} did not start: {'; '.join(ends)}")

    def kill(self) -> None:
        """SIGKILL it and every process that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, seconds: float = PATIENCE) -> int:
        """SIGTERM it; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.plan.name} did not stop within {seconds} s:\n{self.tail()}") from None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@dataclass
class Cluster:
    """Trainer, sampler and gateway on one machine, as `paceline up` starts them."""

    address: str
    api_key: str
    state: Path
    services: dict[str, ServiceProcess] = field(default_factory=dict)

    @classmethod
    def make(cls, state: Path, model: Path, engine: str = "hf", bridge: str = "stream", **settings: str) -> Cluster:
        """Plan a cluster; `settings` are more environment variables for the services.

        vLLM has a KV cache for tiny models, because clearing one of the default size takes longer than the rest of its
        start.
        """
        settings = {"PACELINE_SAMPLER_KV_CACHE_GIB": "0.125", **settings}
        options = UpOptions(
            model=str(model),
            address=f"127.0.0.1:{free_service_ports()}",
            engine=engine,
            bridge=bridge,
            # float32 on a CPU, bfloat16 on GPUs, where vLLM supports no float32 adapters; the same for both services
            dtype="auto",
            max_lora_rank=16,
        )
        key_file = read_or_make_key(state)
        cluster = cls(options.address, key_file.read_text(), state)
        for plan in make_plans(options, state):
            prefix = f"PACELINE_{plan.name.upper()}_"
            extra = {name: value for name, value in settings.items() if name.startswith(prefix)}
            changed = replace(plan, environment={**plan.environment, **extra})
            cluster.services[plan.name] = ServiceProcess(changed, state / f"{plan.name}.log")
        return cluster

    def start(self) -> None:
        for service in self.services.values():
            service.spawn()
        for service in self.services.values():
            service.wait_ready(*(other for other in self.services.values() if other is not service))

    @contextmanager
    def running(self, *services: ServiceProcess):
        """Run these services, started one after the other, or all services, until the block ends."""
        try:
            for service in services:
                service.start()
            if not services:
                self.start()
            yield self
        finally:
            self.stop()
            if base_dir := self.sampler.plan.environment.get("PACELINE_SAMPLER_BASE_DIR"):
                shutil.rmtree(base_dir)

    def stop(self) -> None:
        with ExitStack() as stack:
            for service in self.services.values():
                if service.process is not None and service.process.poll() is None:
                    stack.callback(service.stop)

    def agreements(self, run_id: str = "", *, least: int = 2) -> list[weights_pb.Agreement]:
        """Wait until the trainer has at least that many agreements, and return them.

        With `run_id`, only those of the base model and of this run's versions count.
        """
        credential = (self.state / "credential").read_text()
        with grpc.insecure_channel(self.trainer.plan.environment["PACELINE_TRAINER_LISTEN"]) as channel:
            stub, request = TrainerServiceStub(channel), trainer_pb.GetServerInfoRequest()

            def enough():
                found = stub.GetServerInfo(request, metadata=peer_metadata(credential)).agreements
                found = [one for one in found if not run_id or one.model.run_id in {"", run_id}]
                return found if len(found) >= least else None

            return wait_for(enough, explain=self.sampler.tail)

    @property
    def trainer(self) -> ServiceProcess:
        return self.services["trainer"]

    @property
    def sampler(self) -> ServiceProcess:
        return self.services["sampler"]

    @property
    def gateway(self) -> ServiceProcess:
        return self.services["gateway"]


def wait_for(condition, seconds: float = PATIENCE, explain=str):
    """Return the first true value of `condition()`; fail after `seconds` with what `explain()` says."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        threading.Event().wait(0.05)
    raise AssertionError(f"not so within {seconds} s: {explain()}")
