"""Paceline's arms of `python -m bench.publish`: a trainer and a sampler service, called over gRPC."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np

from bench.device import as_variables
from bench.publish.times import LEARNING_RATE, PROMPT, RANK, STREAM_TOKENS, Place, Times, running
from paceline import codec
from paceline.layout import MODEL_FILE, WEIGHTS_FILE
from paceline.rpc.channel import open_channel
from paceline.rpc.health import wait_until_serving
from paceline.rpc.identity import peer_metadata
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import AdamParams, Datum, LoraConfig
from paceline.types.v1 import model_pb2, sampling_pb2
from paceline.up.plan import Plan, UpOptions, make_plans, read_or_make_key

TENANT = "bench"
_GROUP_SECONDS = 300.0
_ACK_MILLISECONDS = 300_000
"""Timeout of a publish; with the bridge restart it includes the start of an engine."""


@dataclass(frozen=True)
class Way:
    """How versions reach the sampler of an arm."""

    bridge: str
    serves: str = "adapters"

    @property
    def whole(self) -> bool:
        """Whether versions are whole models."""
        return self.serves == "models"


ADAPTER_WAYS = {name: Way(name) for name in ("stream", "volume", "collective", "shared")}
MODEL_WAYS = {"in place": Way("collective", "models"), "restart": Way("restart", "models")}


@asynccontextmanager
async def services(
    options: UpOptions, state: Path, cores: Sequence[int], **settings: str
) -> AsyncIterator[tuple[grpc.aio.Channel, grpc.aio.Channel]]:
    """Run a trainer on the first core and a sampler on the last; yield the channels to them.

    Each of `settings` is passed to the service whose prefix it has. Empty `cores` mean a GPU: both use all cores, and
    the trainer starts when the sampler is ready, because vLLM measures the GPU's free memory while it starts.
    """
    read_or_make_key(state)
    trainer, sampler, _ = make_plans(options, state)
    channels = {}
    async with AsyncExitStack() as stack:
        started: list[tuple[Plan, Path, subprocess.Popen[bytes]]] = []

        async def wait() -> None:
            for plan, log, process in started:
                over = lambda process=process: process.poll() is not None  # noqa: E731
                if not await asyncio.to_thread(wait_until_serving, plan.health, plan.service, over):
                    raise SystemExit(log.read_text(errors="replace")[-20000:])

        for plan in (sampler, trainer):
            prefix = f"PACELINE_{plan.name.upper()}_"
            own = {name: value for name, value in settings.items() if name.startswith(prefix)}
            environment = {**plan.environment, **own, **({"OMP_NUM_THREADS": "1"} if cores else {})}
            if base_dir := environment.get(f"{prefix}BASE_DIR"):
                stack.callback(shutil.rmtree, base_dir, ignore_errors=True)
            core = {cores[0 if plan is trainer else -1]} if cores else set()
            command, log = [sys.executable, "-m", "paceline.services", plan.module], state / f"{plan.name}.log"
            process = stack.enter_context(running(command, core, environment, log))
            started.append((plan, log, process))
            channels[plan.name] = await stack.enter_async_context(open_channel(environment[f"{prefix}LISTEN"]))
            if not cores:
                await wait()
        await wait()
        yield channels["trainer"], channels["sampler"]


class Ours:
    """One run that is published repeatedly to one sampler."""

    def __init__(self, trainer: grpc.aio.Channel, sampler: grpc.aio.Channel, state: Path, way: Way) -> None:
        self._way = way
        self._trainer, self._sampler = TrainerServiceStub(trainer), SamplerServiceStub(sampler)
        self._metadata = peer_metadata((state / "credential").read_text(), TENANT)
        self._versions = state / "checkpoints" / "runs"
        self._datum = codec.datum_to_proto(Datum.from_completion(PROMPT, PROMPT[:4], weight=1.0))
        self._seq_id, self.run_id, self._version = 0, "", 0

    @classmethod
    @asynccontextmanager
    async def start(cls, place: Place, state: Path, address: str, *, way: Way, apply: str) -> AsyncIterator[Self]:
        """Run the services and publish one version."""
        options = UpOptions(
            str(place.model), address=address, bridge=way.bridge, dtype=place.dtype, max_lora_rank=place.rank
        )
        sampling = {**place.engine_settings, "apply": apply, "serves": way.serves}
        settings = as_variables("PACELINE_SAMPLER", sampling) | {"PACELINE_TRAINER_DEVICE": place.device.kind}
        async with services(options, state, place.device.cores, **settings) as (trainer, sampler):
            if way.bridge == "collective":
                await asyncio.to_thread(_wait_for_group, state / "trainer.log")
            ours = cls(trainer, sampler, state, way)
            await ours.create(place.rank)
            yield ours

    @property
    def size(self) -> int:
        """Bytes of a version's weights."""
        newest = max((self._versions / self.run_id / "versions").iterdir(), key=lambda path: path.stat().st_mtime)
        return (newest / (MODEL_FILE if self._way.whole else WEIGHTS_FILE)).stat().st_size

    async def stream(self) -> AsyncIterator[int]:
        async for part in self.sample(STREAM_TOKENS):
            yield len(part.tokens)

    async def step(self) -> None:
        """Train on one short sequence."""
        await self._call("ForwardBackward", trainer_pb.ForwardBackwardRequest, data=[self._datum],
                         loss_fn="cross_entropy")  # fmt: skip
        adamw = codec.optimizer_to_proto(AdamParams(LEARNING_RATE)).adamw
        await self._call("OptimStep", trainer_pb.OptimStepRequest, adamw=adamw)

    async def publish(self) -> Times:
        await self.step()
        start = time.perf_counter()
        reply = await self._call("PublishWeights", trainer_pb.PublishWeightsRequest,
                                 wait_for=trainer_pb.ACK_POLICY_ANY, ack_timeout_ms=_ACK_MILLISECONDS)  # fmt: skip
        active = time.perf_counter()
        self._version = reply.model.version
        await anext(self.sample(1))
        first, ack = time.perf_counter(), reply.acknowledgements[0]
        return Times(
            1e3 * (active - start), 1e3 * (first - start), ack.step_wait_milliseconds, ack.apply_milliseconds,
            reply.stage_milliseconds,
        )  # fmt: skip

    async def create(self, rank: int = RANK) -> None:
        """Create the run and publish its first version."""
        request = trainer_pb.CreateRunRequest(request_id=os.urandom(8).hex())
        if self._way.whole:
            request.full.SetInParent()
        else:
            request.lora.CopyFrom(codec.lora_config_to_proto(LoraConfig(rank)))
        reply = await self._trainer.CreateRun(request, metadata=self._metadata)
        self.run_id = reply.run.run_id
        await self.publish()

    async def sample(self, tokens: int) -> AsyncIterator[Any]:
        """Sample under the newest version; yield the messages."""
        # Only one whole model is loaded at a time: a stream that asked for the previous one would load it again.
        version = None if self._way.whole else self._version
        request = sampler_pb.SampleStreamRequest(
            model=model_pb2.ModelRef(version=model_pb2.VersionRef(run_id=self.run_id, version=version)),
            prompt=codec.tensor_to_proto(np.array(PROMPT, np.int32)),
            params=sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
        )
        call = self._sampler.SampleStream(request, metadata=self._metadata)
        try:
            async for part in call:
                yield part
        finally:
            call.cancel()

    async def _call(self, method: str, message: Any, **fields: Any) -> Any:
        self._seq_id += 1
        request = message(run_id=self.run_id, seq_id=self._seq_id, **fields)
        return await getattr(self._trainer, method)(request, metadata=self._metadata)


def _wait_for_group(log: Path) -> None:
    """Wait until the sampler has joined the trainer's process group; until then versions travel by stream."""
    deadline = time.monotonic() + _GROUP_SECONDS
    while "group formed" not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise SystemExit(f"no process group; see {log}")
        time.sleep(0.1)
