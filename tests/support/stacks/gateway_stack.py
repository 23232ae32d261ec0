"""A real gateway in front of real gRPC servers that implement the parts of the contracts that a proxy needs."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from gateway.service import GatewayService
from gateway.settings import GatewaySettings
from paceline import errors
from paceline.files.key_changes import add_key
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceStub
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import current_identity
from paceline.rpc.interceptors import CredentialInterceptor, ErrorInterceptor
from paceline.rpc.server import Readiness, make_server
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import (
    SamplerServiceServicer,
    SamplerServiceStub,
    add_SamplerServiceServicer_to_server,
)
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import (
    TrainerServiceServicer,
    TrainerServiceStub,
    add_TrainerServiceServicer_to_server,
)
from paceline.types.v1 import model_pb2, quota_pb2
from support.ports import free_port

CREDENTIAL = "credential of the services"
PART_BYTES = 1 << 20
"""Bytes in a part of a download."""
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@dataclass
class Trainer(TrainerServiceServicer):
    """Answers GetRun with the caller's tenant, or `error` if set, and blocks in ListRuns. Downloads never end.

    Its tokenizer is large.
    """

    base: str = "tiny"
    weights: str = ""
    """SHA-256 of its base weights, as it says."""
    error: errors.PacelineError | None = None
    metadata: dict[str, str | bytes] = field(default_factory=dict)
    remaining: float | None = None
    parts: int = 0
    """How many parts of downloads were sent."""
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetServerInfo(self, request, context):
        models = [
            model_pb2.ModelInfo(name=self.base, max_lora_rank=32, max_context_length=512, weights_sha256=self.weights)
        ]
        return trainer_pb.GetServerInfoResponse(models=models, loss_fns=["ppo"], optimizers=["adamw"])

    async def GetUsage(self, request, context):
        used = len(current_identity().tenant)
        return trainer_pb.GetUsageResponse(quotas=[quota_pb2.Quota(name="runs", used=used, limit=64)])

    async def GetTokenizer(self, request, context):
        return trainer_pb.GetTokenizerResponse(files={"tokenizer.json": bytes(PART_BYTES)})

    async def GetRun(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        if self.error is not None:
            raise self.error
        context.set_trailing_metadata((("x-note", "kept"),))
        return trainer_pb.GetRunResponse(
            run=trainer_pb.Run(run_id=request.run_id, base_model=current_identity().tenant)
        )

    async def ListRuns(self, request, context):
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def DownloadCheckpoint(self, request, context):
        while True:
            yield trainer_pb.DownloadCheckpointResponse(data=bytes(PART_BYTES))
            self.parts += 1

    async def ForwardBackward(self, request, context):
        return trainer_pb.ForwardBackwardResponse(metrics={"bytes:sum": request.ByteSize()})


@dataclass
class Sampler(SamplerServiceServicer):
    """Answers with its name. Sample and streams of CompleteText wait while `gate` is closed; streams never end."""

    name: str = "sampler"
    base: str = "tiny"
    weights: str = ""
    """SHA-256 of its base weights, as it says."""
    refusal: str = ""
    error: errors.PacelineError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    running: int = 0
    most_running: int = 0
    reached: dict[int, asyncio.Event] = field(default_factory=dict)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def GetServerInfo(self, request, context):
        model = model_pb2.ModelInfo(
            name=self.base, max_lora_rank=16, max_context_length=1024, weights_sha256=self.weights
        )
        return sampler_pb.GetServerInfoResponse(model=model, sampler_id=self.name, refusal=self.refusal)

    async def GetUsage(self, request, context):
        return sampler_pb.GetUsageResponse(quotas=[quota_pb2.Quota(name="versions", used=1, limit=16)])

    async def Sample(self, request, context):
        if self.error is not None:
            raise self.error
        with self._counted():
            await self.gate.wait()
        return sampler_pb.SampleResponse(model=model_pb2.ServedModel(base_model=self.name))

    async def CompleteText(self, request, context) -> AsyncIterator[sampler_pb.CompleteTextResponse]:
        if not json.loads(request.body).get("stream"):
            with self._counted():
                await self.gate.wait()
            choice = {"index": 0, "text": "", "finish_reason": "stop", "prompt_token_ids": [1, 2], "token_ids": []}
            yield sampler_pb.CompleteTextResponse(data=json.dumps({"choices": [choice]}).encode())
            return
        with self._counted():
            await self.gate.wait()
            while True:
                yield sampler_pb.CompleteTextResponse(data=bytes(1 << 16))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running in self.reached:
            self.reached[self.running].set()
        try:
            yield
        finally:
            self.running -= 1
            self.left.set()

    async def SampleStream(self, request, context) -> AsyncIterator[sampler_pb.SampleStreamResponse]:
        if self.error is not None:
            raise self.error
        try:
            while True:
                self.sent += 1
                yield sampler_pb.SampleStreamResponse(tokens=[1] * 1024)
                await asyncio.sleep(0)
        finally:
            self.left.set()


@asynccontextmanager
async def serving(*servicers: TrainerServiceServicer | SamplerServiceServicer, port: int = 0) -> AsyncIterator[int]:
    """Serve behind the services' own interceptors; yield the port."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor(), CredentialInterceptor(CREDENTIAL)], options=_OPTIONS)
    for servicer in servicers:
        if isinstance(servicer, TrainerServiceServicer):
            add_TrainerServiceServicer_to_server(servicer, server)
        else:
            add_SamplerServiceServicer_to_server(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@dataclass(frozen=True)
class Client:
    """Stubs for the gateway."""

    channel: grpc.aio.Channel
    address: str

    @property
    def trainer(self) -> Any:
        return TrainerServiceStub(self.channel)

    @property
    def sampler(self) -> Any:
        return SamplerServiceStub(self.channel)

    @property
    def gateway(self) -> Any:
        return GatewayServiceStub(self.channel)


def bearer(key: str) -> tuple[str, str]:
    """Return the metadata that carries a key."""
    return ("authorization", f"Bearer {key}")


@asynccontextmanager
async def gateway(
    trainer: int, samplers: Sequence[int | str], keys_file: Path, **settings: Any
) -> AsyncIterator[Client]:
    """Run a gateway in front of the services on these ports, or at these addresses."""
    port = free_port()
    chosen = GatewaySettings(
        listen=f"127.0.0.1:{port}",
        trainer=f"127.0.0.1:{trainer}",
        samplers=tuple(f"127.0.0.1:{at}" if isinstance(at, int) else at for at in samplers),
        keys_file=keys_file,
        credential=CREDENTIAL,
        **settings,
    )
    service = GatewayService(chosen)
    await service.start(Readiness(service.service_names))
    server = make_server(service, chosen, CollectorRegistry())
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield Client(channel, f"127.0.0.1:{port}")
        finally:
            await server.stop(None)
            await service.stop()


@dataclass(frozen=True)
class Stack:
    """Gateway, trainer, sampler, and two tenants' keys."""

    client: Client
    trainer: Trainer
    sampler: Sampler
    key: str
    other_key: str
    keys_file: Path

    @property
    def auth(self) -> Sequence[tuple[str, str]]:
        return (bearer(self.key),)

    @property
    def other_auth(self) -> Sequence[tuple[str, str]]:
        return (bearer(self.other_key),)


@asynccontextmanager
async def stack(folder: Path, **settings: Any) -> AsyncIterator[Stack]:
    """Run everything in this process."""
    keys_file = folder / "keys.json"
    key, other_key = add_key(keys_file, "team-a", "laptop"), add_key(keys_file, "team-b", "cluster")
    trainer, sampler = Trainer(), Sampler()
    async with AsyncExitStack() as running:
        trainer_port = await running.enter_async_context(serving(trainer))
        sampler_port = await running.enter_async_context(serving(sampler))
        client = await running.enter_async_context(gateway(trainer_port, [sampler_port], keys_file, **settings))
        yield Stack(client, trainer, sampler, key, other_key, keys_file)
