"""OpenAI's API for sampling. The sampler answers in OpenAI's format, from the weights that `model` names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from gateway.http.leaving import while_connected
from gateway.http.models import NAME, Models
from gateway.http.problems import problem_body
from gateway.http.services import Services
from gateway.http.tinker.api import tenant_of
from paceline import codec, errors
from paceline.chat import read_object
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import CheckpointKind, ServedModel

_SECONDS = 3600.0
_OWNER = "paceline"
Part = pb.CompleteTextResponse
WithoutModel = Callable[[str, dict[str, Any]], Awaitable[tuple[str, dict[str, Any]]]]


class OpenAiApi:
    """The routes below /v1."""

    def __init__(self, services: Services, models: Models, without_model: WithoutModel) -> None:
        """`without_model` returns the model and the complete body for a tenant's chat that names no model."""
        self._services = services
        self._models = models
        self._without_model = without_model

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix="/v1")

        @router.get("/models/{name:path}")
        async def model(request: Request, name: str) -> dict[str, Any]:
            for entry in await self._list(tenant_of(request)):
                if entry["id"] == name.partition("@")[0]:
                    return {**entry, "id": name}
            raise errors.ModelNotFound(f"no such model: {name[:100]}; GET /v1/models lists them", field="model")

        return router

    def calls(self, prefix: str) -> APIRouter:
        """Return the sampling routes below `/v1`, or below a prefix that names the weights for clients that do not."""
        router = APIRouter(prefix=prefix)

        @router.get("/models")
        async def models(request: Request) -> dict[str, Any]:
            name = request.path_params.get("weights")
            if name is None:
                return {"object": "list", "data": await self._list(tenant_of(request))}
            await self._models.resolve(tenant_of(request), name)
            return {"object": "list", "data": [_entry(name, 0)]}

        @router.post("/completions")
        async def completions(request: Request) -> Response:
            return await self._complete(request, pb.TEXT_ENDPOINT_COMPLETIONS)

        @router.post("/chat/completions")
        async def chat_completions(request: Request) -> Response:
            return await self._complete(request, pb.TEXT_ENDPOINT_CHAT_COMPLETIONS)

        return router

    async def complete_whole(
        self, tenant: str, name: str, body: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a completion's whole response, and the headers that name the weights it was sampled from."""
        ref = await self._models.resolve(tenant, name)
        message = pb.CompleteTextRequest(
            model=codec.model_ref_to_proto(ref), endpoint=pb.TEXT_ENDPOINT_COMPLETIONS, body=json.dumps(body).encode()
        )
        route = "" if ref.is_base else str(ref)
        async with self._services.stream(tenant, message, Part, route=route, seconds=_SECONDS) as parts:
            async for part in parts:
                return json.loads(part.data), version_headers(codec.served_model_from_proto(part.model))
        raise errors.EngineUnavailable("the sampler ended the answer before it began; try again")

    async def _list(self, tenant: str) -> list[Mapping[str, Any]]:
        """Return the entries that can be sampled from: the base model, runs with a version, sampler checkpoints."""
        base = [_entry(name, 0) for name in self._models.base_names(await self._models.describe(tenant))]
        published = [run for run in await self._models.runs(tenant) if run.latest_version]
        named = {run.user_metadata[NAME]: run for run in reversed(published) if run.user_metadata.get(NAME)}
        runs = [
            _entry(name, run.create_time.timestamp(), latest_version=run.latest_version)
            for name, run in [*((run.run_id, run) for run in published), *named.items()]
        ]
        checkpoints = [
            _entry(checkpoint.path, checkpoint.create_time.timestamp(), sha256=checkpoint.sha256)
            for checkpoint in await self._models.checkpoints(tenant)
            if checkpoint.kind is CheckpointKind.SAMPLER
        ]
        return [*base, *runs, *checkpoints]

    async def _complete(self, request: Request, endpoint: pb.TextEndpoint.ValueType) -> Response:
        content = await request.body()
        body, tenant = read_object(content), tenant_of(request)
        name, streams = request.path_params.get("weights") or body.get("model"), body.get("stream")
        if name is None and endpoint == pb.TEXT_ENDPOINT_CHAT_COMPLETIONS:
            name, body = await self._without_model(tenant, body)
            content = json.dumps(body).encode()
        if not isinstance(name, str) or not name:
            raise errors.MissingField("is not set; GET /v1/models lists what there is", field="model")
        if streams not in (None, True, False):
            raise errors.InvalidArgument("must be true or false", field="stream")
        ref = await self._models.resolve(tenant, name)
        message = pb.CompleteTextRequest(model=codec.model_ref_to_proto(ref), endpoint=endpoint, body=content)
        route = "" if ref.is_base else str(ref)
        with _named_as_the_caller_does():
            answer = self._answer(tenant, message, route, streams=bool(streams))
            return await (answer if streams else while_connected(request, answer))

    async def _answer(self, tenant: str, message: pb.CompleteTextRequest, route: str, *, streams: bool) -> Response:
        async with AsyncExitStack() as open_until_read:
            parts = await open_until_read.enter_async_context(
                self._services.stream(tenant, message, Part, route=route, seconds=_SECONDS)
            )
            # Wait for the first part before responding, so that a refusal sets the status.
            first = await anext(parts, None)
            if first is None:
                raise errors.EngineUnavailable("the sampler ended the answer before it began; try again")
            headers = version_headers(codec.served_model_from_proto(first.model))
            if not streams:
                return Response(first.data, headers=headers, media_type="application/json")
            held = open_until_read.pop_all()
        return StreamingResponse(_events(first, parts, held), headers=headers, media_type="text/event-stream")


def version_headers(model: ServedModel) -> dict[str, str]:
    """Return the headers that name the weights a response was sampled from."""
    told = {
        "Run": model.run_id,
        "Version": str(model.version or ""),
        "Checkpoint": model.checkpoint,
        "Sha256": model.sha256,
    }
    return {"X-Paceline-Model": model.base_model} | {
        f"X-Paceline-{name}": value for name, value in told.items() if value
    }


@contextmanager
def _named_as_the_caller_does() -> Iterator[None]:
    """Name the field `model` in errors about any part of it."""
    try:
        yield
    except errors.PacelineError as error:
        if error.field.startswith("model."):
            error.field = "model"
        raise


async def _events(first: Part, parts: AsyncIterator[Part], held: AsyncExitStack) -> AsyncIterator[bytes]:
    """Yield server-sent events; an error mid-stream becomes the last event."""
    async with held:
        try:
            yield b"data: " + first.data + b"\n\n"
            async for part in parts:
                yield b"data: " + part.data + b"\n\n"
        except errors.PacelineError as error:
            yield b"data: " + json.dumps(problem_body(error)).encode() + b"\n\n"
            return
        yield b"data: [DONE]\n\n"


def _entry(name: str, created: float, **more: object) -> Mapping[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": _OWNER, **more}
