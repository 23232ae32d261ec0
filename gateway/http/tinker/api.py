"""The data plane: sessions, training, sampling, futures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zstandard
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError, Message
from pydantic import Field

from gateway.http.json_bodies import JsonRoute, Texts
from gateway.http.middleware import tenant_of
from gateway.http.models import Models
from gateway.http.problems import problem
from gateway.http.tinker.downloads import Downloads
from gateway.http.tinker.futures import JSON, Futures, Kind, Result, Work
from gateway.http.tinker.names import Aliases, Names
from gateway.http.tinker.sampling import Asample, Sampling
from gateway.http.tinker.sessions import SessionOver, Sessions
from gateway.http.tinker.store import Sampler, Store
from gateway.http.tinker.training import (
    MAX_NAME,
    MAX_NUMBER,
    Body,
    CreateModel,
    LoadWeights,
    OfModel,
    OptimStep,
    SaveForSampler,
    SaveWeights,
    Training,
    model_id_of,
    sampler_id_of,
)
from paceline import errors
from paceline.requests.bodies import decoded
from paceline.rpc.bounds import check_wire
from paceline.tinker.v1 import tinker_pb2
from paceline.types import CheckpointKind

_LONG_POLL_SECONDS = 30.0
"""The SDK gives up after 45 s."""
_PLAIN = "identity"
_GONE = 410
_STILL_WAITING = 408


class ClientConfig(Body):
    """Request of client/config."""

    sdk_version: str = ""


class CreateSession(Body):
    """Request of create_session."""

    tags: Texts = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class OfSession(Body):
    """A request that names a session."""

    session_id: str


class CreateSamplingSession(Body):
    """Request of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=MAX_NUMBER)
    base_model: str | None = Field(None, max_length=MAX_NAME)
    model_path: str | None = Field(None, max_length=MAX_NAME)


class OfSampler(Body):
    """A request that names a sampler."""

    sampling_session_id: str


class RetrieveFuture(Body):
    """Request of retrieve_future and of cancel_future."""

    request_id: str
    allow_metadata_only: bool = False


class Target(Body):
    """The sampler clone whose futures are requested."""

    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0, le=MAX_NUMBER)


class RetrieveFutures(Body):
    """Request of retrieve_futures."""

    target: Target
    prev_cursor: int = Field(0, ge=0, le=2**63)
    timeout: float | None = Field(None, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class DataPlane:
    """Accepts work and returns results."""

    store: Store
    sessions: Sessions
    futures: Futures
    training: Training
    sampling: Sampling
    names: Names
    aliases: Aliases
    models: Models
    downloads: Downloads
    max_body_bytes: int
    tokenizer: str
    """Where clients load the tokenizer from; empty means the model's name."""

    def routes(self) -> APIRouter:
        """Return the routes below /api/v1."""
        router = APIRouter(route_class=JsonRoute)
        self._add_sessions(router)
        self._add_training(router)
        self._add_sampling(router)
        self._add_futures(router)
        return router

    async def _accept(
        self, request: Request, kind: Kind[Any], request_id: str, session_id: str, body: Any, **more: object
    ) -> JSONResponse:
        tenant = tenant_of(request)
        self.sessions.check(tenant, session_id)
        size = body.ByteSize() if isinstance(body, Message) else len(await request.body())
        await self.futures.post(kind, request_id, tenant, session_id, body, size)
        return JSONResponse({"request_id": request_id, **more})

    async def _new_model(self, request: Request, kind: Kind[Any], body: Any) -> JSONResponse:
        model_id = model_id_of(body.session_id, body.model_seq_id)
        return await self._accept(request, kind, f"{model_id}:0", body.session_id, body, model_id=model_id)

    async def _command(self, request: Request, kind: Kind[Any], body: Any) -> JSONResponse:
        if body.seq_id < 1:
            raise errors.OutOfRange("must be 1 or more", field="seq_id")
        model = self.names.model(tenant_of(request), body.model_id)
        request_id = f"{model.model_id}:{body.seq_id}"
        return await self._accept(request, kind, request_id, model.session_id, body, model_id=model.model_id)

    def _add_sessions(self, router: APIRouter) -> None:
        @router.get("/healthz")
        async def healthz() -> dict[str, str]:
            return {"status": "ok"}

        @router.post("/client/config")
        async def client_config(body: ClientConfig) -> dict[str, Any]:
            # The first two make SDKs before 0.26 write the format that later ones always write.
            return {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True, "parallel_fwdbwd_chunks": True}

        @router.post("/client/dynamic_config")
        async def dynamic_config(body: ClientConfig) -> dict[str, Any]:
            return {"sample_cancel_enabled": True}

        @router.post("/create_session")
        async def create_session(request: Request, body: CreateSession) -> dict[str, Any]:
            tenant = tenant_of(request)
            session_id = await self.sessions.open(tenant, body.tags, body.user_metadata, body.display_name)
            opened = {"session_id": session_id, "type": "create_session"}
            if head := await self.models.unserved_head(tenant):
                # The SDK logs it.
                opened["warning_message"] = (
                    f"no sampler here serves an adapter on {head}, so models are created as with train_unembed=False"
                )
            return opened

        @router.post("/session_heartbeat", response_model=None)
        async def session_heartbeat(request: Request, body: OfSession) -> JSONResponse | dict[str, str]:
            try:
                self.sessions.check(tenant_of(request), body.session_id)
            except SessionOver as over:
                return problem(over, request.url.path, _GONE)
            return {"type": "session_heartbeat"}

        @router.post("/sessions/{session_id}/finish", status_code=204)
        async def finish(request: Request, session_id: str) -> None:
            await self.sessions.finish(tenant_of(request), session_id)

        @router.post("/telemetry")
        async def telemetry(request: Request) -> dict[str, str]:
            await request.body()  # read so that the connection can be reused; the content is discarded
            return {"status": "accepted"}

    def _add_training(self, router: APIRouter) -> None:
        @router.post("/create_model")
        async def create_model(request: Request, body: CreateModel) -> JSONResponse:
            return await self._new_model(request, self.training.create_model, body)

        @router.post("/get_info")
        async def get_info(request: Request, body: OfModel) -> dict[str, Any]:
            model = self.names.model(tenant_of(request), body.model_id)
            data = {"arch": "unknown", "model_name": model.base_model, "tokenizer_id": self.tokenizer or None}
            return {
                "type": "get_info",
                "model_id": model.model_id,
                "model_data": data,
                "model_name": model.base_model,
                "is_lora": bool(model.lora),
                "lora_rank": model.lora.get("rank"),
                "optimizer_config": {"type": "adamw"},
            }

        @router.post("/forward_backward")
        async def forward_backward(request: Request) -> JSONResponse:
            content = await request.body()
            encoding = request.headers.get("content-encoding", _PLAIN)
            size = _expanded_size(content, encoding, self.max_body_bytes)
            # The batch counts what it expands to while it is read, and as posted work from then on.
            with self.futures.counted(tenant_of(request), 0 if encoding == _PLAIN else size):
                message = await decoded(size, _read, content, encoding, self.max_body_bytes)
                return await self._command(request, self.training.forward_backward, message)

        @router.post("/optim_step")
        async def optim_step(request: Request, body: OptimStep) -> JSONResponse:
            return await self._command(request, self.training.optim_step, body)

        @router.post("/save_weights")
        async def save_weights(request: Request, body: SaveWeights) -> JSONResponse:
            return await self._command(request, self.training.save_weights, body)

        @router.post("/save_weights_external")
        async def save_weights_external(request: Request, body: SaveWeights) -> JSONResponse:
            return await self._command(request, self.training.save_external, body)

        @router.post("/save_weights_for_sampler")
        async def save_weights_for_sampler(request: Request, body: SaveForSampler) -> JSONResponse:
            return await self._command(request, self.training.save_for_sampler, body)

        @router.post("/unload_model")
        async def unload_model(request: Request, body: OfModel) -> JSONResponse:
            model = self.names.model(tenant_of(request), body.model_id)
            request_id = f"{model.model_id}:unload"
            return await self._accept(
                request, self.training.unload_model, request_id, model.session_id, body, model_id=model.model_id
            )

        @router.post("/load_weights")
        async def load_weights(request: Request, body: LoadWeights) -> JSONResponse:
            if body.model_id is not None:
                if body.seq_id is None:
                    raise errors.MissingField("is not set; number it after the command before it", field="seq_id")
                return await self._command(request, self.training.load_weights, body)
            if body.session_id is None or body.model_seq_id is None:
                raise errors.MissingField(
                    "is not set; name the model, or session_id and model_seq_id", field="model_id"
                )
            return await self._new_model(request, self.training.load_weights, body)

    def _add_sampling(self, router: APIRouter) -> None:
        @router.post("/create_sampling_session")
        async def create_sampling_session(request: Request, body: CreateSamplingSession) -> dict[str, str]:
            tenant = tenant_of(request)
            self.sessions.check(tenant, body.session_id)
            if not body.base_model and not body.model_path:
                raise errors.MissingField("is not set; name model_path or base_model", field="base_model")
            sampler_id = sampler_id_of(body.session_id, body.sampling_session_seq_id)
            served = (await self.models.describe_sampler(tenant)).model.name
            base_model, checkpoint = body.base_model or "", ""
            if body.model_path:
                path = self.names.checkpoint(tenant, body.model_path, "model_path")
                if path.kind is not CheckpointKind.SAMPLER:
                    message = "is training state; sample from what save_weights_for_sampler gave (sampler_weights)"
                    raise errors.InvalidPath(message, field="model_path")
                await self.downloads.files(tenant, path)  # raises CheckpointNotFound
                checkpoint = str(path)
                model = self.store.model_of_run(path.run_id)
                base_model = base_model or (model.base_model if model else served)
            elif self.aliases.served(base_model) not in {"", served}:
                raise errors.ModelNotFound(f"no such base model; {served} is served", field="base_model")
            path_given = body.model_path or ""
            sampler = Sampler(
                sampler_id, tenant, body.session_id, base_model, checkpoint=checkpoint, model_path=path_given
            )
            await self.store.add_sampler(sampler)
            return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

        @router.post("/join_sampling_session")
        async def join_sampling_session(request: Request, body: OfSampler) -> dict[str, int]:
            sampler = self.sampling.sampler(tenant_of(request), body.sampling_session_id)
            return {"client_counter": await self.store.add_clone(sampler.sampler_id)}

        @router.get("/samplers/{sampler_id}")
        async def get_sampler(request: Request, sampler_id: str) -> dict[str, str | None]:
            sampler = self.sampling.sampler(tenant_of(request), sampler_id)
            path = sampler.model_path or None
            return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": path}

        @router.post("/asample")
        async def asample(request: Request, body: Asample) -> JSONResponse:
            sampler = self.sampling.sampler(tenant_of(request), body.sampling_session_id)
            request_id = f"{sampler.sampler_id}:{body.seq_id}"
            sequence_ids = [f"{request_id}:{index}" for index in range(min(body.num_samples, 65536))]
            kind, seeded = self.sampling.sample, self.sampling.with_seed(request_id, body)
            return await self._accept(
                request, kind, request_id, sampler.session_id, seeded, sample_sequence_ids=sequence_ids
            )

    def _add_futures(self, router: APIRouter) -> None:
        @router.post("/retrieve_future")
        async def retrieve_future(request: Request, body: RetrieveFuture) -> Response:
            found = await self.futures.result(tenant_of(request), body.request_id, _LONG_POLL_SECONDS)
            if isinstance(found, Work):
                state = {"type": "try_again", "request_id": found.request_id, "queue_state": found.queue_state}
                if found.queue_state_reason:
                    state["queue_state_reason"] = found.queue_state_reason
                return JSONResponse(state, _STILL_WAITING)
            return Response(found.body, media_type=found.media)

        @router.post("/retrieve_futures")
        async def retrieve_futures(request: Request, body: RetrieveFutures) -> dict[str, Any]:
            target = body.target
            sampler = self.sampling.sampler(tenant_of(request), target.sampling_session_id)
            patience = _LONG_POLL_SECONDS if body.timeout is None else min(max(body.timeout, 0.0), _LONG_POLL_SECONDS)
            done, cursor = await self.futures.completions(
                sampler.tenant, sampler.sampler_id, target.cloned_sampler_id, body.prev_cursor, patience
            )
            return {"completions": [_completion(request_id, result) for request_id, result in done], "cursor": cursor}

        @router.post("/cancel_future")
        async def cancel_future(request: Request, body: RetrieveFuture) -> dict[str, str]:
            await self.futures.cancel(tenant_of(request), body.request_id)
            return {"request_id": body.request_id}


def _completion(request_id: str, result: Result) -> dict[str, Any]:
    if result.media == JSON:
        return {"state": "failed", "request_id": request_id}
    size = len(result.body)
    return {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}


def _expanded_size(content: bytes, encoding: str, max_bytes: int) -> int:
    """Return the most bytes that a body has once it is decompressed. Raises MessageTooLarge, UnreadableMessage."""
    if encoding == _PLAIN:
        return len(content)
    if encoding != "zstd":
        raise errors.UnreadableMessage(f"content-encoding {encoding[:40]} is not supported; send zstd or none")
    try:
        size = zstandard.frame_content_size(content)
    except zstandard.ZstdError as error:
        raise _no_frame(max_bytes) from error
    if size > max_bytes:
        raise errors.MessageTooLarge(f"the body is {size} bytes once it is decompressed; at most {max_bytes}")
    return max_bytes if size < 0 else int(size)  # a frame need not say


def _read(content: bytes, encoding: str, max_bytes: int) -> tinker_pb2.ForwardBackwardRequest:
    """Decompress and parse a batch. Raises UnreadableMessage, and OutOfRange for too many fields."""
    if encoding != _PLAIN:
        try:
            # Exactly one frame, with nothing after it.
            frame = zstandard.ZstdDecompressor()
            content = frame.decompress(content, max_output_size=max_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _no_frame(max_bytes) from error
    check_wire(content, tinker_pb2.ForwardBackwardRequest.DESCRIPTOR)
    try:
        return tinker_pb2.ForwardBackwardRequest.FromString(content)
    except DecodeError as error:
        message = "the body is not a ForwardBackwardRequest; SDKs from 0.24 on write it as protobuf"
        raise errors.UnreadableMessage(message) from error


def _no_frame(max_bytes: int) -> errors.PacelineError:
    message = f"the body is not one whole frame of zstd, of at most {max_bytes} bytes once it is decompressed"
    return errors.UnreadableMessage(message)
