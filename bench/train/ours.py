"""Paceline's arm of `python -m bench.train`: the real trainer service in its own processes, called over gRPC."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from support.ports import free_port

from paceline import codec
from paceline.layout import CheckpointPath
from paceline.rpc.channel import MAX_MESSAGE_BYTES
from paceline.rpc.health import wait_until_serving
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Datum, LoraConfig

RANK = 16
LOSS = "importance_sampling"
_SERVICE = "paceline.trainer.v1.TrainerService"
_LIMITS = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]


@dataclass(frozen=True)
class TrainerOptions:
    """Options for starting a trainer service."""

    model: str
    dtype: str
    device: str
    core: int
    """Core that it runs on, if the device is a CPU."""
    clock: str
    """wall, or cpu for processor time."""
    pack_tokens: int = 4096
    settings: Sequence[str] = ()
    """Further settings, as name=value."""

    def environment(self) -> dict[str, str]:
        """Return the settings as environment variables."""
        settings = {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "pack_tokens": str(self.pack_tokens),
            "insecure": "true",
            "log_level": "WARNING",
            **dict(setting.split("=", 1) for setting in self.settings),
        }
        return {f"PACELINE_TRAINER_{name.upper()}": value for name, value in settings.items()}


class Trainer:
    """One run on a trainer service."""

    def __init__(self, stub: TrainerServiceStub, pid: int, volume: Path, options: TrainerOptions) -> None:
        self._stub, self._pid, self._volume, self._seq_id = stub, pid, volume, 0
        self._clock, self._device = options.clock, options.device
        (self._engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        request = pb.CreateRunRequest(request_id=os.urandom(8).hex(), lora=codec.lora_config_to_proto(LoraConfig(RANK)))
        self._run_id = stub.CreateRun(request).run.run_id

    def forward_backward(self, data: list[Datum], *, forward_only: bool = False) -> tuple[float, Any]:
        """Encode, call, decode; return seconds and (loss, log-probabilities of each datum)."""
        start = self.now()
        encoded = [codec.datum_to_proto(datum) for datum in data]
        reply = self._call("ForwardBackward", pb.ForwardBackwardRequest, data=encoded, loss_fn=LOSS,
                           forward_only=forward_only)  # fmt: skip
        logprobs = [codec.output_from_proto(output, "outputs")["logprobs"] for output in reply.outputs]
        return self.now() - start, (reply.metrics["loss:sum"], logprobs)

    def optim_step(self, learning_rate: float) -> None:
        self._call("OptimStep", pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=learning_rate))

    def save_state(self, name: str) -> Path:
        """Save weights and the pending gradient; return the directory."""
        kind = pb.CHECKPOINT_KIND_STATE
        reply = self._call("SaveCheckpoint", pb.SaveCheckpointRequest, name=name, kind=kind)
        path = CheckpointPath.parse(reply.checkpoint.path)
        return self._volume / "runs" / path.run_id / path.kind.folder / path.name

    def now(self) -> float:
        """Return seconds: wall-clock time, or the processor time of this process, the service and its engine."""
        if self._clock == "wall":
            return time.perf_counter()
        ticks = 0
        for pid in (str(self._pid), self._engine):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def peak(self) -> int:
        """Return the engine's peak memory in bytes: resident on a CPU, all memory in use on a GPU."""
        if self._device == "cuda":
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]) * 2**20
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self._engine}/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024

    def way(self, data: list[Datum]) -> float:
        """Return the seconds of RPC and serialisation for a batch: an empty call, plus what the batch's size adds."""
        start = time.perf_counter()
        self._stub.GetRun(pb.GetRunRequest(run_id=self._run_id))
        call = time.perf_counter() - start
        whole, least = (
            self.forward_backward(part, forward_only=True)[0] for part in (one_counted(data), first_token(data))
        )
        return call + max(0.0, whole - least)

    def _call(self, method: str, message: Any, /, **fields: Any) -> Any:
        self._seq_id += 1
        return getattr(self._stub, method)(message(run_id=self._run_id, seq_id=self._seq_id, **fields))


def one_counted(data: list[Datum]) -> list[Datum]:
    """Return data of the same size of which only one token is computed."""
    masks = [np.zeros_like(datum.loss_fn_inputs["mask"]) for datum in data]
    masks[0][0] = 1
    return [Datum(d.model_input, {**d.loss_fn_inputs, "mask": mask}) for d, mask in zip(data, masks, strict=True)]


def first_token(data: list[Datum]) -> list[Datum]:
    """Return data of that token alone."""
    inputs = {name: values[:1] for name, values in one_counted(data)[0].loss_fn_inputs.items()}
    return [Datum(data[0].model_input[:1], inputs)]


@contextmanager
def start_trainer(options: TrainerOptions, state: Path) -> Iterator[Trainer]:
    """Run a trainer service until the block ends; on a CPU, on one core."""
    state.mkdir()
    listen, health = (f"127.0.0.1:{free_port()}" for _ in range(2))
    places = {"LISTEN": listen, "HEALTH_LISTEN": health, "CHECKPOINT_DIR": str(state / "volume")}
    environment = os.environ | options.environment() | {f"PACELINE_TRAINER_{k}": v for k, v in places.items()}
    if options.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "paceline.services", "trainer_service"], env=environment)
    if options.device == "cpu":
        os.sched_setaffinity(process.pid, {options.core})
    try:
        if not wait_until_serving(health, _SERVICE, lambda: process.poll() is not None):
            raise SystemExit("the trainer did not start")
        with grpc.insecure_channel(listen, options=_LIMITS) as channel:
            yield Trainer(TrainerServiceStub(channel), process.pid, state / "volume", options)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
