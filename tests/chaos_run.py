"""Runs that train while the trainer is killed over and over, and the same runs without any fault."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
import numpy as np
from ports import free_port, is_free
from safetensors.numpy import load_file
from stable_answers import stable
from unreliable_proxy import UnreliableProxy
from warm_processes import WarmProcesses

from paceline import codec, errors
from paceline.rpc.status import error_from_rpc
from paceline.trainer.v1 import trainer_service_pb2 as pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Datum
from paceline.types.v1 import lora_pb2
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
TOLERANCE = 1e-5
"""Norm of the difference, relative, between runs that shared passes with others and those that did not."""
WINDOW = 4
"""Commands that a client has under way."""


def command(seed, run_id, seq_id):
    """Return the method and request of a run's command; what it is depends on `seed` and `seq_id` alone."""
    rng = Random(seed * 1_000_003 + seq_id)
    kind = rng.choices(("forward", "step", "state", "sampler", "publish", "load", "bad"), (10, 8, 2, 1, 3, 1, 1))[0]
    common = {"run_id": run_id, "seq_id": seq_id}
    if kind == "forward":
        datum = Datum.from_completion([rng.randrange(250) for _ in range(6)], [rng.randrange(250) for _ in range(6)])
        data = [codec.datum_to_proto(datum)]
        only = rng.random() < 0.1
        return "ForwardBackward", pb.ForwardBackwardRequest(
            **common, data=data, loss_fn="cross_entropy", forward_only=only
        )
    if kind == "step":
        adamw = pb.AdamwParams(learning_rate=rng.uniform(1e-4, 1e-2))
        return "OptimStep", pb.OptimStepRequest(**common, adamw=adamw)
    if kind in {"state", "sampler"}:
        which = pb.CHECKPOINT_KIND_STATE if kind == "state" else pb.CHECKPOINT_KIND_SAMPLER
        name, overwrite = f"c{rng.randrange(4)}", rng.random() < 0.7
        return "SaveCheckpoint", pb.SaveCheckpointRequest(**common, name=name, kind=which, overwrite=overwrite)
    if kind == "publish":
        return "PublishWeights", pb.PublishWeightsRequest(**common, durable=rng.random() < 0.3)
    if kind == "load":
        path = f"paceline://{run_id}/state/c{rng.randrange(4)}"
        return "LoadCheckpoint", pb.LoadCheckpointRequest(**common, path=path, with_optimizer=rng.random() < 0.7)
    return "ForwardBackward", pb.ForwardBackwardRequest(**common, loss_fn="none")


@dataclass
class Client:
    """Trains one run, sends everything until it is answered, and keeps every answer."""

    stub: TrainerServiceStub
    seed: int
    answers: dict[int, str] = field(default_factory=dict)
    run_id: str = ""
    seq_id: int = 0

    async def create(self) -> None:
        lora = lora_pb2.LoraConfig(rank=4, seed=self.seed, dropout=0.1)
        reply = await self._until_answered("CreateRun", pb.CreateRunRequest(request_id=f"r{id(self)}", lora=lora))
        self.run_id = reply.run.run_id

    async def forward_backward(self):
        datum = codec.datum_to_proto(Datum.from_completion([1, 2, 3], [4, 5, 6, 7, 8, 9]))
        return await self._next("ForwardBackward", pb.ForwardBackwardRequest, data=[datum], loss_fn="cross_entropy")

    async def optim_step(self):
        adamw = pb.AdamwParams(learning_rate=1e-3)
        return await self._next("OptimStep", pb.OptimStepRequest, adamw=adamw)

    async def train(self, is_over) -> None:
        """Issue commands, several at a time, until `is_over` says so."""
        under_way = set()
        while not is_over(self):
            self.seq_id += 1
            under_way.add(asyncio.create_task(self._command(self.seq_id)))
            if len(under_way) >= WINDOW:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                [task.result() for task in done]
        await asyncio.gather(*under_way)

    async def finish(self, volume: Path) -> dict[str, Path]:
        """Save the run's state; return the files that make it up, and those of each version, by their names."""
        await self._next("SaveCheckpoint", pb.SaveCheckpointRequest, name="final", kind=pb.CHECKPOINT_KIND_STATE)
        folder = volume / "runs" / self.run_id
        names = ("adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json")
        files = [folder / "state" / "final" / name for name in names]
        files += sorted((folder / "versions").glob("[0-9]*/adapter_model.safetensors"))
        return {str(path.relative_to(folder)): path for path in files}

    async def _next(self, method, message, **fields):
        self.seq_id += 1
        return await self._until_answered(method, message(run_id=self.run_id, seq_id=self.seq_id, **fields))

    async def _command(self, seq_id) -> None:
        method, request = command(self.seed, self.run_id, seq_id)
        try:
            reply = await self._until_answered(method, request)
            self.answers[seq_id] = stable(reply)
        except errors.PacelineError as error:
            self.answers[seq_id] = error.reason

    async def _until_answered(self, method, request):
        return await until_answered(self.stub, method, request)


async def until_answered(stub: TrainerServiceStub, method: str, request):
    """Send a request until it is answered; return the reply. Raises what it is refused with."""
    while True:
        try:
            return await getattr(stub, method)(request, timeout=30)
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
        if not isinstance(error, (errors.Unavailable, errors.SeqIdGap, errors.TimedOut)):
            raise error
        await asyncio.sleep(0.02)


@dataclass
class Outcome:
    """What the killing came to."""

    kills: Counter
    commands: int
    faults: int
    seconds: float
    differences: list[str]


class Chaos:
    """A trainer that is killed, its clients, and their reference.

    With `joint_passes` runs share passes, so which others wait at the time changes the rounding of a run's numbers:
    weights and states are then compared within TOLERANCE, and answers by their kind.
    """

    def __init__(self, directory: Path, model: Path, seed: int, *, joint_passes: bool = False) -> None:
        self.joint_passes = joint_passes
        self.directory, self.seed = directory, seed
        self.random = Random(seed)
        self.kills: Counter = Counter()
        self.volume = directory / "checkpoints"
        self.warm = WarmProcesses(directory)
        self.port, self.health = free_port(), free_port()
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PACELINE_TRAINER_MODEL": str(model),
            "PACELINE_TRAINER_DTYPE": "float32",
            "PACELINE_TRAINER_DEVICE": "cpu",
            "PACELINE_TRAINER_LISTEN": f"127.0.0.1:{self.port}",
            "PACELINE_TRAINER_HEALTH_LISTEN": f"127.0.0.1:{self.health}",
            "PACELINE_TRAINER_CHECKPOINT_DIR": str(self.volume),
            "PACELINE_TRAINER_STAGING_DIR": str(directory),
            "PACELINE_TRAINER_INSECURE": "true",
            "PACELINE_TRAINER_JOINT_PASSES": str(joint_passes).lower(),
            "PACELINE_TRAINER_SNAPSHOT_COMMANDS": "7",
            "PACELINE_TRAINER_KEEP_VERSIONS": "1000000",
            "PACELINE_TRAINER_GAP_WAIT_SECONDS": "20",
            # A kill from outside is no poison.
            "PACELINE_TRAINER_MAX_ATTEMPTS": "1000000",
            "PACELINE_TRAINER_LOG_LEVEL": "WARNING",
        }

    async def run(self, kills: int, clients: int = 2) -> Outcome:
        """Kill the trainer `kills` times while clients train; then train the same without a fault and compare."""
        start = time.perf_counter()
        proxy = UnreliableProxy(f"127.0.0.1:{self.port}", self.seed)
        stub_port = await proxy.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stub_port}") as channel:
            stub = TrainerServiceStub(channel)
            killing = asyncio.create_task(asyncio.to_thread(self._kill_until, kills))
            faulty = [Client(stub, self.seed + index) for index in range(clients)]
            await asyncio.gather(*(client.create() for client in faulty))
            await asyncio.gather(*(client.train(lambda _: killing.done()) for client in faulty))
            service = await killing
            seconds = time.perf_counter() - start
            proxy.faulty = False
            reference = [Client(stub, client.seed) for client in faulty]
            await asyncio.gather(*(client.create() for client in reference))
            pairs = list(zip(faulty, reference, strict=True))
            await asyncio.gather(*(ours.train(_has_issued(theirs.seq_id)) for theirs, ours in pairs))
            found = [await self._compare(*pair) for pair in pairs]
        service.stop()
        service.wait(60)
        await proxy.stop()
        commands = sum(client.seq_id for client in faulty)
        return Outcome(self.kills, commands, proxy.faults, seconds, [line for lines in found for line in lines])

    def close(self) -> None:
        self.warm.close()

    def _kill_until(self, kills: int):
        while self.kills.total() < kills:
            self._live_once()
        return self.start("")

    def start(self, failpoints: str):
        """Start the service with points at which it or its engine dies."""
        environment = {**self.environment, "PACELINE_TRAINER_FAILPOINTS": failpoints}
        return self.warm.start(environment, self.directory / "trainer.log")

    def _live_once(self) -> None:
        """Start the service, let it come to a point at which it or its engine dies, and count."""
        engine = self.random.random() < 0.25
        name = f"engine_{self.random.choice(ENGINE_POINTS)}" if engine else self.random.choice(SERVICE_POINTS)
        service = self.start(f"{name}:{self.random.randint(1, 8)}")
        life, deadline, is_up = self.random.uniform(0.0, 3.0), time.monotonic() + 120, False
        first: list[int] = []
        while not service.wait(0.02):
            first = first or service.engines()
            if not is_up and self._is_up():
                is_up, deadline = True, time.monotonic() + life
            if engine and first and service.engines() != first:
                self.kills[name] += 1
                engine = False
                deadline = time.monotonic() + self.random.uniform(0.0, 1.0)
            if time.monotonic() > deadline:
                service.kill()
                service.wait(10)
                self.kills["at any moment"] += 1
                return
        self.kills[name] += 1

    def _is_up(self) -> bool:
        return not is_free(self.port)

    async def _compare(self, theirs: Client, ours: Client) -> list[str]:
        """Return how a run with faults differs from the same run without."""
        found = [
            f"seed {theirs.seed} command {seq_id}: {theirs.answers.get(seq_id)} and not {answer}"
            for seq_id, answer in ours.answers.items()
            if not self._is_same_answer(theirs.answers.get(seq_id, ""), answer)
        ]
        one, other = await theirs.finish(self.volume), await ours.finish(self.volume)
        found += [f"seed {theirs.seed}: {name} is only in one" for name in one.keys() ^ other.keys()]
        shared = one.keys() & other.keys()
        return found + [
            f"seed {theirs.seed}: {name} differs" for name in shared if not self._is_same(one[name], other[name])
        ]

    def _is_same_answer(self, one: str, other: str) -> bool:
        return one.partition("(")[0] == other.partition("(")[0] if self.joint_passes else one == other

    def _is_same(self, one: Path, other: Path) -> bool:
        if one.read_bytes() == other.read_bytes():
            return True
        return self.joint_passes and one.suffix == ".safetensors" and _distance(one, other) <= TOLERANCE


def _distance(one: Path, other: Path) -> float:
    """Return the norm of the difference of two files' tensors, relative to the first's."""
    first, second = load_file(one), load_file(other)
    if first.keys() != second.keys():
        return float("inf")
    pairs = [(first[name].astype(np.float64), second[name].astype(np.float64)) for name in first]
    difference = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return (difference / max(sum(float((a**2).sum()) for a, _ in pairs), 1e-300)) ** 0.5


def _has_issued(count):
    return lambda client: client.seq_id >= count
