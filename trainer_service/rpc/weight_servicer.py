"""weights.v1.WeightService: delivers versions to samplers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc

from paceline import codec, errors, layout, weights
from paceline.base_model.base_weights import check_same_base
from paceline.layout import CheckpointPath
from paceline.rpc.identity import PEER_TENANT, Identity, current_identity
from paceline.types import CheckpointKind, ModelInfo, ModelRef
from paceline.weights.v1 import weight_service_pb2 as pb
from paceline.weights.v1.weight_service_pb2_grpc import WeightServiceServicer, add_WeightServiceServicer_to_server
from trainer_service.checkpoints.store import CheckpointStore
from trainer_service.publish.agreements import Agreements
from trainer_service.publish.process_group import BroadcastGroup
from trainer_service.publish.publisher import Publisher
from trainer_service.publish.servable import ServingLimits
from trainer_service.publish.watch_hub import Watcher, WatchHub
from trainer_service.runs.registry import RunRegistry

_ATTEMPTS = 3
"""How often weights that are removed or overwritten while they are opened are looked for."""

Context = grpc.aio.ServicerContext[Any, Any]


class WeightServicer(WeightServiceServicer):
    """RPCs for announcements, acknowledgements and the bytes of versions."""

    def __init__(
        self,
        hub: WatchHub,
        group: BroadcastGroup,
        publisher: Publisher,
        registry: RunRegistry,
        checkpoints: CheckpointStore,
        describe: Callable[[], ModelInfo],
        agreements: Agreements,
    ) -> None:
        """`describe` returns the trainer's base model."""
        self._hub = hub
        self._group = group
        self._publisher = publisher
        self._registry = registry
        self._checkpoints = checkpoints
        self._describe = describe
        self._agreements = agreements
        self._instance = uuid4().hex

    async def WatchVersions(
        self, request_iterator: AsyncIterator[pb.WatchVersionsRequest], context: Context
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        watcher = await self._join(request_iterator, current_identity())
        self._group.changed(watcher)
        self._agreements.on_join(watcher)
        listening = asyncio.create_task(self._listen(watcher, request_iterator))
        try:
            async for response in _outbox(watcher, listening):
                yield response
        finally:
            listening.cancel()
            is_gone = await self._hub.leave(watcher)
            self._agreements.on_leave(watcher, is_gone=is_gone)
            self._group.changed(watcher)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        add_WeightServiceServicer_to_server(self, server)
        weights.add_fetch_version(server, self.FetchVersion)

    async def FetchVersion(  # type: ignore[override]
        self, request: pb.FetchVersionRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Yield serialised replies; the handler that `register` adds sends them as they are."""
        identity, ref = current_identity(), codec.model_ref_from_proto(request.model)
        if request.accept_staged_path and identity.is_peer:
            directory = self._find(ref, identity)
            if (staged := self._publisher.staged_manifest(directory)) is not None:
                yield pb.FetchVersionResponse(manifest=staged).SerializeToString()
                file = directory / weights.weights_file(staged)
                yield pb.FetchVersionResponse(staged_path=str(file)).SerializeToString()
                return
        manifest, replies = self._open(ref, identity)
        yield pb.FetchVersionResponse(manifest=manifest).SerializeToString()
        for reply in replies:
            yield reply

    async def _join(self, requests: AsyncIterator[pb.WatchVersionsRequest], identity: Identity) -> Watcher:
        async for first in requests:
            # Not refused earlier: a call that ends while its first message is in flight loses its status.
            if not identity.is_peer:
                raise errors.MissingCredential("versions are announced only to samplers")
            if first.WhichOneof("message") == "hello" and first.hello.sampler_id:
                hello = first.hello
                self._check_base(hello)
                held = {(held.run_id, held.version): held.blake3 for held in hello.held}
                watcher = Watcher(
                    hello.sampler_id,
                    held,
                    {held.run_id: held.version for held in hello.held if held.newest},
                    joins_group=hello.joins_group,
                    links_staged=hello.links_staged,
                    needs_volume=hello.needs_volume,
                    limits=ServingLimits(hello.serves, hello.max_lora_rank, frozenset(hello.unserved_modules)),
                    instance=hello.instance,
                )
                watcher.outbox.put_nowait(pb.WatchVersionsResponse(welcome=pb.Welcome(trainer_instance=self._instance)))
                await self._hub.join(watcher)
                return watcher
            break
        raise errors.InvalidArgument("the first message must be a hello with a sampler_id", field="hello.sampler_id")

    def _check_base(self, hello: pb.Hello) -> None:
        """Refuse a sampler with another base model or other base weights. Raises BaseMismatch."""
        model = self._describe()
        check_same_base(model.weights_sha256, hello.base_sha256, f"sampler {hello.sampler_id} has")
        if hello.base_model not in {"", model.name}:
            raise errors.BaseMismatch(
                f"sampler {hello.sampler_id} serves {hello.base_model}, but the trainer's model is {model.name}; "
                "give both the same model_name",
                metadata={"theirs": hello.base_model, "ours": model.name},
            )

    async def _listen(self, watcher: Watcher, requests: AsyncIterator[pb.WatchVersionsRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "acknowledgement":
                    await self._acknowledge(watcher, request.acknowledgement)
                case "refusal":
                    await self._hub.refuse(watcher, request.refusal)
                case "release":
                    self._hub.release(watcher, (request.release.run_id, request.release.version))
                case "left_group":
                    self._group.left(watcher, request.left_group)
                case "agreement":
                    self._agreements.record(watcher, request.agreement)
                case _:
                    raise errors.InvalidArgument(
                        "only acknowledgement, release, refusal, left_group or agreement may follow the hello",
                        field="message",
                    )

    async def _acknowledge(self, watcher: Watcher, ack: pb.Acknowledgement) -> None:
        if await self._hub.acknowledge(watcher, ack):
            with suppress(errors.RunNotFound):  # deleted meanwhile
                run = self._registry.get(ack.run_id, Identity(PEER_TENANT))
                self._agreements.acknowledged(watcher, run, ack.version, is_refused=ack.run_refused)

    def _open(self, ref: ModelRef, identity: Identity) -> tuple[pb.Manifest, Iterator[bytes]]:
        """Return the manifest of weights, and the replies that carry them, from a file that is open by now.

        Weights that are removed or overwritten meanwhile are looked for once more. Raises VersionNotFound or
        CheckpointNotFound if they are gone.
        """
        for _ in range(_ATTEMPTS):
            directory = self._find(ref, identity)
            with suppress(FileNotFoundError), layout.opened(directory) as opened:
                manifest = self._publisher.staged_manifest(directory) or weights.read_manifest(opened)
                return manifest, weights.read_replies(opened / weights.weights_file(manifest))
        raise weights.absent(ref)

    def _find(self, ref: ModelRef, identity: Identity) -> Path:
        if ref.is_base:
            raise errors.InvalidArgument(
                "the base model is not served here; name a version or checkpoint", field="model"
            )
        if not ref.checkpoint:
            return self._publisher.find(self._registry.get(ref.run_id, identity), ref.version)
        path = CheckpointPath.parse(ref.checkpoint, "model.checkpoint")
        if path.kind is not CheckpointKind.SAMPLER:
            raise errors.InvalidPath("is a state checkpoint; save one for the sampler", field="model.checkpoint")
        return self._checkpoints.find(path, identity, "model.checkpoint")


async def _outbox(watcher: Watcher, listening: asyncio.Task[None]) -> AsyncIterator[pb.WatchVersionsResponse]:
    """Yield responses for the watcher until it leaves or the trainer ends its watch.

    Raises the error that its messages caused, or the error with which its watch is to end.
    """
    while True:
        next_response = asyncio.create_task(watcher.outbox.get())
        try:
            await asyncio.wait({next_response, listening}, return_when=asyncio.FIRST_COMPLETED)
            if not next_response.done():
                listening.result()
                return
            response = next_response.result()
            if response is None:
                return
            if isinstance(response, errors.PacelineError):
                raise response
            yield response
        finally:
            next_response.cancel()
