"""A small but real WeightService that serves versions from a volume, and the versions that it serves."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline import errors
from paceline.layout import WEIGHTS_FILE, CheckpointPath, Volume
from paceline.rpc.identity import PEER_TENANT, current_identity
from paceline.rpc.interceptors import CredentialInterceptor, ErrorInterceptor
from paceline.types import ServedModel
from paceline.types.v1 import model_pb2
from paceline.weights import describe_weights, read_manifest, read_replies, write_manifest
from paceline.weights.v1 import weight_service_pb2 as weights_pb
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceServicer, add_WeightServiceServicer_to_server

CREDENTIAL = "credential of the services"
TENANT = "rouleur"
BASE = "tiny"


def make_adapter(
    directory: Path, base: Path, seed: int, rank: int = 4, targets: tuple[str, ...] | str = ("q_proj", "v_proj")
) -> Path:
    """Write a PEFT directory whose B is not zero, so that it changes the model's output."""
    config, shapes = _adapter_of(base, rank, targets)
    draws = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=draws) * 0.1 for name, shape in shapes.items()}
    config.save_pretrained(directory)
    save_file(weights, directory / WEIGHTS_FILE)
    return directory


@cache
def _adapter_of(base: Path, rank: int, targets: tuple[str, ...] | str) -> tuple[LoraConfig, dict[str, torch.Size]]:
    """Return an adapter's configuration, and its weights' shapes by the names that PEFT gives them."""
    modules = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, inference_mode=True)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    weights = get_peft_model_state_dict(peft, save_embedding_layers=False)
    return config, {name: weight.shape for name, weight in weights.items()}


def make_version(volume: Volume, base: Path, run_id: str, version: int, **options: Any) -> weights_pb.Manifest:
    """Put a version on a volume, as a trainer would; its number seeds its weights."""
    return _describe(
        volume.version(run_id, version), base, ServedModel(BASE, run_id, version), **{"seed": version, **options}
    )


def make_checkpoint(volume: Volume, base: Path, path: str, seed: int, **options: Any) -> weights_pb.Manifest:
    """Put a sampler checkpoint on a volume, replacing any present one."""
    parsed = CheckpointPath.parse(path)
    return _describe(
        volume.checkpoint(parsed), base, ServedModel(BASE, parsed.run_id, checkpoint=path), seed=seed, **options
    )


def _describe(
    directory: Path,
    base: Path,
    model: ServedModel,
    *,
    seed: int,
    tenant: str = TENANT,
    rank: int = 4,
    factor: float = 1.0,
) -> weights_pb.Manifest:
    directory.mkdir(parents=True, exist_ok=True)
    weights = make_adapter(directory, base, seed, rank) / WEIGHTS_FILE
    save_file({name: factor * weight for name, weight in load_file(weights).items()}, weights)
    manifest = describe_weights(directory, model, tenant=tenant, step=seed)
    write_manifest(directory, manifest)
    return manifest


@dataclass
class Trainer(WeightServiceServicer):
    """Serves versions from a volume and keeps what samplers send."""

    volume: Volume
    damage: bool = False
    """Whether to flip a bit in every chunk."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """While closed, FetchVersion waits before its first chunk."""
    shared: Path | None = None
    """Directory named to samplers that accept a staged path; it holds versions by run and number."""
    fetched: list[str] = field(default_factory=list)
    said: list[weights_pb.WatchVersionsRequest] = field(default_factory=list)
    announced: list[weights_pb.WatchVersionsResponse] = field(default_factory=list)
    outboxes: list[asyncio.Queue[weights_pb.WatchVersionsResponse | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def announce(self, manifest: weights_pb.Manifest, volume_path: str = "", newest: int = 0) -> None:
        message = weights_pb.Announcement(manifest=manifest, volume_path=volume_path, newest_version=newest)
        self.tell(weights_pb.WatchVersionsResponse(announcement=message))

    def offer(self, manifest: weights_pb.Manifest, path: Path) -> None:
        """Offer a staged version whose checksums are not known yet."""
        draft = weights_pb.Manifest()
        draft.CopyFrom(manifest)
        draft.model.ClearField("blake3")
        draft.ClearField("crc32c")
        self.tell(weights_pb.WatchVersionsResponse(staged=weights_pb.Staged(manifest=draft, staged_path=str(path))))

    def tell(self, message: weights_pb.WatchVersionsResponse) -> None:
        self.announced.append(message)
        for outbox in self.outboxes:
            outbox.put_nowait(message)

    def restart(self, instance: str) -> None:
        """Reconnect as another instance, which has announced nothing yet."""
        self.announced = [weights_pb.WatchVersionsResponse(welcome=weights_pb.Welcome(trainer_instance=instance))]
        self.hang_up()

    def hang_up(self) -> None:
        """End every watch."""
        for outbox in self.outboxes:
            outbox.put_nowait(None)

    def heard(self, kind: str) -> list[Any]:
        """Return all messages of one kind that samplers sent, in order."""
        return [getattr(message, kind) for message in self.said if message.WhichOneof("message") == kind]

    async def WatchVersions(self, request_iterator, context) -> AsyncIterator[weights_pb.WatchVersionsResponse]:
        outbox: asyncio.Queue[weights_pb.WatchVersionsResponse | None] = asyncio.Queue()
        for message in self.announced:
            outbox.put_nowait(message)
        self.outboxes.append(outbox)
        listening = asyncio.create_task(self._listen(request_iterator))
        listening.add_done_callback(lambda _: outbox.put_nowait(None))
        try:
            while (message := await outbox.get()) is not None:
                yield message
            if listening.done():
                listening.result()
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
    """Split a file into the chunks in which it travels."""
    return [weights_pb.FetchVersionResponse.FromString(reply).chunk for reply in read_replies(weights)]


@asynccontextmanager
async def serving(trainer: Trainer, port: int = 0) -> AsyncIterator[int]:
    """Serve a trainer behind the services' own interceptors; yield the port."""
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(), CredentialInterceptor(CREDENTIAL)],
        options=(("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 5_000)),
    )
    add_WeightServiceServicer_to_server(trainer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert bound
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)
