"""A real sampler on a tiny model that watches a trainer's WeightService, both in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from prometheus_client import CollectorRegistry

from paceline.codec import tensor_to_proto
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import PEER_TENANT, peer_metadata
from paceline.rpc.server import Readiness, make_server
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.types.v1 import model_pb2, sampling_pb2
from sampler_service.engine.factory import create_service_engine
from sampler_service.engine.protocol import SamplerEngine
from sampler_service.engine.restartable import RestartableEngine
from sampler_service.service import SamplerService
from sampler_service.settings import SamplerSettings
from support.patience import PATIENCE
from support.stacks.weight_stack import BASE, CREDENTIAL, TENANT

PROMPT = list(b"the riders are in file")


@dataclass
class Client:
    """Calls the sampler as a tenant."""

    channel: grpc.aio.Channel
    readiness: Readiness
    staging: Path
    engine: SamplerEngine
    metrics: CollectorRegistry
    address: str
    tenant: str = TENANT

    def be(self, tenant: str) -> Client:
        return replace(self, tenant=tenant)

    def metric(self, name: str) -> float | None:
        return self.metrics.get_sample_value(f"paceline_sampler_{name}")

    async def is_ready(self) -> bool:
        request = HealthCheckRequest(service=self.readiness.names[0])
        return (await self.readiness.servicer.Check(request, None)).status == HealthCheckResponse.SERVING

    @property
    def stub(self) -> Any:
        return SamplerServiceStub(self.channel)

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        return peer_metadata(CREDENTIAL, self.tenant)

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, metadata=self.metadata, timeout=PATIENCE)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    async def sample(self, model: model_pb2.ModelRef, **fields: Any) -> pb.SampleResponse:
        return await self.call("Sample", sample_request(model, **fields))

    async def logprobs(self, model: model_pb2.ModelRef) -> tuple[bytes, model_pb2.ServedModel]:
        request = pb.ComputeLogprobsRequest(model=model, tokens=tokens(PROMPT))
        answer = await self.call("ComputeLogprobs", request)
        return answer.logprobs.data, answer.model

    async def loaded(self) -> dict[int, pb.LoadedVersion]:
        """Return the loaded versions by number."""
        answer = await self.be(PEER_TENANT).call("ListVersions", pb.ListVersionsRequest())
        return {version.model.version: version for version in answer.versions}

    def staged(self) -> list[Path]:
        """Return the directories of streamed adapters."""
        return [path for path in self.staging.glob("paceline-sampler-*/*") if path.is_dir()]


def tokens(ids: Sequence[int]) -> Any:
    return tensor_to_proto(np.array(ids, np.int32))


def sample_request(model: model_pb2.ModelRef, *, prompt: Sequence[int] = PROMPT, **fields: Any) -> pb.SampleRequest:
    num_samples = fields.pop("num_samples", 0)
    params = sampling_pb2.SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "seed": 1, **fields})
    return pb.SampleRequest(model=model, prompt=tokens(prompt), params=params, num_samples=num_samples)


def stream_request(model: model_pb2.ModelRef, **fields: Any) -> pb.SampleStreamRequest:
    request = sample_request(model, **fields)
    return pb.SampleStreamRequest(
        model=request.model, prompt=request.prompt, params=request.params, num_samples=request.num_samples
    )


def version_ref(run_id: str, version: int | None = None) -> model_pb2.ModelRef:
    return model_pb2.ModelRef(version=model_pb2.VersionRef(run_id=run_id, version=version))


def base_ref(name: str = "") -> model_pb2.ModelRef:
    return model_pb2.ModelRef(base=model_pb2.BaseModel(name=name))


@asynccontextmanager
async def sampling(
    model: Path, trainer_port: int, folder: Path, running: SamplerEngine | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """Run a sampler on a tiny model with the hf engine, or with `running`, an engine that already runs."""
    chosen = SamplerSettings(
        **{
            "model": str(model),
            "model_name": BASE,
            "engine": "hf",
            "dtype": "float32",
            "trainer": f"127.0.0.1:{trainer_port}",
            "credential": CREDENTIAL,
            "staging_dir": folder / "staging",
            "checkpoint_dir": folder / "volume",
            "sampler_id": "domestique",
            "max_lora_rank": 8,
            "reflection": False,
            "kv_cache_gib": 0.125,
            **settings,
        }
    )
    registry = CollectorRegistry()
    engine = (
        RestartableEngine(lambda _: running, chosen.engine_options)
        if running
        else create_service_engine(chosen.mode, chosen.engine_options)
    )
    service = SamplerService(chosen, engine, registry)
    readiness = Readiness(service.service_names)
    await service.start(readiness)
    with (
        TemporaryDirectory() as sockets
    ):  # A socket's path is limited to 107 characters, and a test's folder may be longer.
        address = f"unix:{sockets}/sampler"
        server = make_server(service, chosen.model_copy(update={"listen": address}), registry)
        await server.start()
        await readiness.set(True)
        async with open_channel(address) as channel:
            try:
                yield Client(channel, readiness, folder / "staging", engine, registry, address)
            finally:
                await server.stop(None)
                await service.stop()


async def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Return the first true value of `condition()`, which may be a coroutine function; fail after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)
