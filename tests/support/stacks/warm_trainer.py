"""A trainer that tests can start, kill and restart in a fraction of a second, and a run on it."""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import grpc

from paceline import codec, errors
from paceline.codec.commands import execute_request
from paceline.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from paceline.rpc.health import wait_until_serving
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Datum
from paceline.types.v1 import lora_pb2
from support.models.tiny_models import make_tiny_llama
from support.patience import PATIENCE
from support.ports import free_port
from support.stacks.warm_processes import WarmProcesses

SERVICE = "paceline.trainer.v1.TrainerService"
DATUM = codec.datum_to_proto(Datum.from_completion([1, 2, 3], [4, 5, 6]))


class WarmTrainer:
    """The real trainer service on a tiny model and a volume."""

    def __init__(self, directory: Path, volume: Path | None = None) -> None:
        self.volume = volume or directory / "volume"
        self.log = directory / "trainer.log"
        self.port, self.health = free_port(), free_port()
        self.warm = WarmProcesses.at_hand(directory)
        self.service = None
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PACELINE_TRAINER_MODEL": str(make_tiny_llama(directory / "model")),
            "PACELINE_TRAINER_DTYPE": "float32",
            "PACELINE_TRAINER_DEVICE": "cpu",
            "PACELINE_TRAINER_LISTEN": f"127.0.0.1:{self.port}",
            "PACELINE_TRAINER_HEALTH_LISTEN": f"127.0.0.1:{self.health}",
            "PACELINE_TRAINER_CHECKPOINT_DIR": str(self.volume),
            "PACELINE_TRAINER_STAGING_DIR": str(directory),
            "PACELINE_TRAINER_SCRATCH_DIR": str(directory / "scratch"),
            "PACELINE_TRAINER_INSECURE": "true",
            "PACELINE_TRAINER_JOINT_PASSES": "false",
        }

    def start(self, **settings):
        """Start it and return whether it serves; `settings` are environment variables without their prefix."""
        given = {f"PACELINE_TRAINER_{name.upper()}": str(value) for name, value in settings.items()}
        self.service = self.warm.start({**self.environment, **given}, self.log)
        return wait_until_serving(f"127.0.0.1:{self.health}", SERVICE, lambda: self.service.wait(0.01))

    def kill(self):
        """Kill the service and its engine."""
        self.service.kill()
        assert self.service.wait(PATIENCE)

    def kill_engine(self):
        """Kill only the engine."""
        for pid in self.service.engines():
            os.kill(pid, signal.SIGKILL)

    def close(self):
        self.warm.close()

    def text(self):
        """Return its log."""
        return self.log.read_text(errors="replace")

    @contextmanager
    def metrics(self):
        """Yield a stub of the metrics."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield MetricsServiceStub(channel)

    @contextmanager
    def connect(self):
        """Yield a stub."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield TrainerServiceStub(channel)


class WarmRun:
    """A run, called from a thread, that repeats each command until it is answered."""

    def __init__(self, stub, request_id="run", **lora):
        self.stub = stub
        self.seq_id = 0
        adapter = lora_pb2.LoraConfig(**{"rank": 1, "seed": 7, **lora})
        self.request = pb.CreateRunRequest(request_id=request_id, lora=adapter, user_metadata={"purpose": "format"})
        self.run_id = self.call("CreateRun", self.request).run.run_id

    def call(self, method, request, seconds=PATIENCE):
        while True:
            try:
                return getattr(self.stub, method)(request, timeout=seconds, wait_for_ready=True)
            except grpc.RpcError as failure:
                error = error_from_rpc(failure)
                if not isinstance(error, errors.Unavailable):
                    raise error from None

    def execute(self, command, seq_id):
        """Return the statuses of a command that Execute sends."""
        request = execute_request(command, self.run_id, seq_id, 0)
        try:
            return [reply.status for reply in self.stub.Execute(request, timeout=PATIENCE)]
        except grpc.RpcError as failure:
            raise error_from_rpc(failure) from None

    def send(self, method, message, **fields):
        self.seq_id += 1
        return self.call(method, message(run_id=self.run_id, seq_id=self.seq_id, **fields))

    def forward_backward(self):
        return self.send("ForwardBackward", pb.ForwardBackwardRequest, data=[DATUM], loss_fn="cross_entropy")

    def step(self):
        self.forward_backward()
        return self.send("OptimStep", pb.OptimStepRequest, adamw=pb.AdamwParams(learning_rate=1e-2))

    def save(self, name, kind=pb.CHECKPOINT_KIND_STATE, **fields):
        return self.send("SaveCheckpoint", pb.SaveCheckpointRequest, name=name, kind=kind, **fields).checkpoint

    def load(self, path):
        return self.send("LoadCheckpoint", pb.LoadCheckpointRequest, path=path, with_optimizer=True).run

    def publish(self, **fields):
        return self.send("PublishWeights", pb.PublishWeightsRequest, **fields).model

    def get(self):
        return self.call("GetRun", pb.GetRunRequest(run_id=self.run_id)).run

    def delete(self, *, checkpoints=False):
        return self.call("DeleteRun", pb.DeleteRunRequest(run_id=self.run_id, delete_checkpoints=checkpoints))
