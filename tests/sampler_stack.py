"""A real sampler on a tiny model, following a small real WeightService, both in this process."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from paceline import errors
from paceline.codec import tensor_to_proto
from paceline.layout import CONFIG_FILE, WEIGHTS_FILE, CheckpointPath, Volume
from paceline.rpc.channel import open_channel
from paceline.rpc.identity import PEER_TENANT, current_identity, peer_metadata
from paceline.rpc.interceptors import CredentialInterceptor, ErrorInterceptor
from paceline.rpc.server import Readiness, make_server
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.types import ServedModel
from paceline.types.v1 import model_pb2, sampling_pb2
from paceline.weights import describe_adapter, read_manifest, read_replies, write_manifest
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceServicer, add_WeightServiceServicer_to_server
from sampler_service.engine.base import SamplerEngine
from sampler_service.engine.factory import create_service_engine
from sampler_service.service import SamplerService
from sampler_service.settings import SamplerSettings

CREDENTIAL = "credential of the services"
TENANT = "rouleur"
BASE = "tiny"
PROMPT = list(b"the riders are in file")


def make_adapter(directory: Path, base: Path, seed: int, rank: int = 4) -> Path:
    """Write a PEFT directory whose B is not zero, so that it changes what the model says."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft = get_peft_model(model, config)
    peft.save_pretrained(directory)
    for path in directory.iterdir():
        if path.name not in {WEIGHTS_FILE, CONFIG_FILE}:
            path.unlink()
    return directory


def make_version(volume: Volume, base: Path, run_id: str, version: int, **facts: Any) -> weights_pb.Manifest:
    """Put a version on a volume, as a trainer would; its weights come from its number."""
    return _describe(
        volume.version(run_id, version), base, ServedModel(BASE, run_id, version), **{"seed": version, **facts}
    )


def make_checkpoint(volume: Volume, base: Path, path: str, seed: int, **facts: Any) -> weights_pb.Manifest:
    """Put a sampler checkpoint on a volume, replacing what is there."""
    parsed = CheckpointPath.parse(path)
    return _describe(
        volume.checkpoint(parsed), base, ServedModel(BASE, parsed.run_id, checkpoint=path), seed=seed, **facts
    )


def _describe(
    directory: Path, base: Path, model: ServedModel, *, seed: int, tenant: str = TENANT, rank: int = 4
) -> weights_pb.Manifest:
    directory.mkdir(parents=True, exist_ok=True)
    make_adapter(directory, base, seed, rank)
    manifest = describe_adapter(directory, model, tenant=tenant, step=seed)
    write_manifest(directory, manifest)
    return manifest


@dataclass
class Trainer(WeightServiceServicer):
    """Serves versions from a volume and keeps what samplers say."""

    volume: Volume
    damage: bool = False
    """Flip a bit in what is sent."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Closed, FetchVersion waits before its first chunk."""
    shared: Path | None = None
    """Where samplers that accept it are told that staged versions lie, by run and version."""
    fetched: list[str] = field(default_factory=list)
    said: list[weights_pb.WatchVersionsRequest] = field(default_factory=list)
    announced: list[weights_pb.WatchVersionsResponse] = field(default_factory=list)
    outboxes: list[asyncio.Queue[weights_pb.WatchVersionsResponse | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def announce(self, manifest: weights_pb.Manifest, volume_path: str = "") -> None:
        message = weights_pb.Announcement(manifest=manifest, volume_path=volume_path)
        self.tell(weights_pb.WatchVersionsResponse(announcement=message))

    def offer(self, manifest: weights_pb.Manifest, path: Path) -> None:
        """Tell of a version whose checksums are not known yet."""
        draft = weights_pb.Manifest()
        draft.CopyFrom(manifest)
        draft.model.ClearField("sha256")
        draft.ClearField("crc32c")
        self.tell(weights_pb.WatchVersionsResponse(staged=weights_pb.Staged(manifest=draft, staged_path=str(path))))

    def tell(self, message: weights_pb.WatchVersionsResponse) -> None:
        self.announced.append(message)
        for outbox in self.outboxes:
            outbox.put_nowait(message)

    def hang_up(self) -> None:
        """End every watch."""
        for outbox in self.outboxes:
            outbox.put_nowait(None)

    def heard(self, kind: str) -> list[Any]:
        """All that samplers said of one kind, in order."""
        return [getattr(message, kind) for message in self.said if message.WhichOneof("message") == kind]

    async def WatchVersions(self, request_iterator, context) -> AsyncIterator[weights_pb.WatchVersionsResponse]:
        outbox: asyncio.Queue[weights_pb.WatchVersionsResponse | None] = asyncio.Queue()
        for message in self.announced:
            outbox.put_nowait(message)
        self.outboxes.append(outbox)
        listening = asyncio.create_task(self._listen(request_iterator))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            self.outboxes.remove(outbox)
            listening.cancel()

    async def _listen(self, requests) -> None:
        async for message in requests:
            self.said.append(message)

    async def FetchVersion(self, request, context) -> AsyncIterator[weights_pb.FetchVersionResponse]:
        directory = self._directory(request.model)
        manifest = weights_pb.Manifest()
        if (directory / "manifest.json").exists():
            manifest = read_manifest(directory)
        tenant = current_identity().tenant
        if not manifest.tenant or tenant not in {PEER_TENANT, manifest.tenant}:
            raise self._absent(request.model, tenant)
        yield weights_pb.FetchVersionResponse(manifest=manifest)
        if self.shared is not None and request.accept_staged_path and tenant == PEER_TENANT:
            path = self.shared / directory.parents[1].name / directory.name / WEIGHTS_FILE
            yield weights_pb.FetchVersionResponse(staged_path=str(path))
            return
        self.fetched.append(directory.name)
        await self.gate.wait()
        for chunk in chunks_of(directory / WEIGHTS_FILE):
            if self.damage:
                chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
            yield weights_pb.FetchVersionResponse(chunk=chunk)

    def _directory(self, ref: model_pb2.ModelRef) -> Path:
        if ref.checkpoint:
            return self.volume.checkpoint(CheckpointPath.parse(ref.checkpoint))
        versions = self.volume.run(ref.version.run_id) / "versions"
        newest = max((int(path.name) for path in versions.glob("[0-9]*")), default=0)
        return versions / str(ref.version.version if ref.version.HasField("version") else newest)

    def _absent(self, ref: model_pb2.ModelRef, tenant: str) -> errors.NotFound:
        if ref.checkpoint:
            return errors.CheckpointNotFound("no such checkpoint")
        versions = (self.volume.run(ref.version.run_id) / "versions").glob("[0-9]*/manifest.json")
        owners = {json.loads(path.read_text())["tenant"] for path in versions}
        return errors.VersionNotFound("no such version") if tenant in owners else errors.RunNotFound("no such run")


def chunks_of(weights: Path) -> list[weights_pb.Chunk]:
    """Cut a file into the chunks in which it travels."""
    return [weights_pb.FetchVersionResponse.FromString(reply).chunk for reply in read_replies(weights)]


@asynccontextmanager
async def serving(trainer: Trainer, port: int = 0) -> AsyncIterator[int]:
    """Serve a trainer behind the services' own interceptors; yields the port."""
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(), CredentialInterceptor(CREDENTIAL)], options=(("grpc.so_reuseport", 0),)
    )
    add_WeightServiceServicer_to_server(trainer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert bound
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@dataclass
class Client:
    """Calls the sampler as a tenant."""

    channel: grpc.aio.Channel
    readiness: Readiness
    staging: Path
    engine: SamplerEngine
    metrics: CollectorRegistry
    tenant: str = TENANT

    def be(self, tenant: str) -> Client:
        return replace(self, tenant=tenant)

    @property
    def stub(self) -> Any:
        return SamplerServiceStub(self.channel)

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        return peer_metadata(CREDENTIAL, self.tenant)

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, metadata=self.metadata, timeout=60)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    async def sample(self, model: model_pb2.ModelRef, **fields: Any) -> pb.SampleResponse:
        return await self.call("Sample", sample_request(model, **fields))

    async def logprobs(self, model: model_pb2.ModelRef) -> tuple[bytes, model_pb2.ServedModel]:
        request = pb.ComputeLogprobsRequest(model=model, tokens=tokens(PROMPT))
        answer = await self.call("ComputeLogprobs", request)
        return answer.logprobs.data, answer.model

    async def loaded(self) -> dict[int, pb.LoadedVersion]:
        """What is loaded, by version."""
        answer = await self.be(PEER_TENANT).call("ListVersions", pb.ListVersionsRequest())
        return {version.model.version: version for version in answer.versions}

    def staged(self) -> list[Path]:
        """Directories of streamed adapters."""
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
    """Run a sampler on a tiny model with the hf engine, or with one that runs already."""
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
            **settings,
        }
    )
    registry = CollectorRegistry()
    engine = running or create_service_engine(chosen.engine, chosen.bridge, chosen.serves, chosen.engine_options)
    service = SamplerService(chosen, engine, registry)
    readiness = Readiness(service.service_names)
    await service.start(readiness)
    with (
        TemporaryDirectory() as sockets
    ):  # A socket's path has 107 characters at most, and a test's folder may be long.
        address = f"unix:{sockets}/sampler"
        server = make_server(service, chosen.model_copy(update={"listen": address}), registry)
        await server.start()
        async with open_channel(address) as channel:
            try:
                yield Client(channel, readiness, folder / "staging", engine, registry)
            finally:
                await server.stop(None)
                await service.stop()


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first true value of `condition()`, which may be a coroutine function; fail after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)
