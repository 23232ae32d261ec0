"""OpenAI's API for sampling. The sampler answers in OpenAI's format, from the weights that `model` names."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.http.middleware import tenant_of, while_connected
from gateway.http.models import Models, entry_of
from gateway.http.problems import last_event
from gateway.http.services import Services
from gateway.http.streaming import EVENTS, StreamedResponse
from paceline import codec, errors
from paceline.chat.bodies import read_object
from paceline.requests.bodies import decoded
from paceline.sampler.v1 import sampler_service_pb2 as pb
from paceline.types import ModelRef

_SECONDS = 3600.0
Part = pb.CompleteTextResponse


@dataclass(frozen=True, slots=True)
class OpenAiApi:
    """The routes below /v1."""

    services: Services
    models: Models
    without_model: Callable[[str, dict[str, Any]], Awaitable[tuple[str, dict[str, Any]]]]
    """Returns the model and the complete body for a tenant's chat that names no model."""

    def routes(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix="/v1", tags=["openai"])

        @router.get("/models/{name:path}")
        async def model(request: Request, name: str) -> dict[str, Any]:
            return {**await self.models.entry(tenant_of(request), name)}

        return router

    def calls(self, prefix: str) -> APIRouter:
        """Return the sampling routes below `/v1`, or below a prefix that names the weights for clients that do not."""
        router = APIRouter(prefix=prefix, tags=["openai"])

        @router.get("/models")
        async def models(request: Request) -> dict[str, Any]:
            name = request.path_params.get("weights")
            if name is None:
                return (await self.models.listing(tenant_of(request))).body()
            await self.models.resolve(tenant_of(request), name)
            return {"object": "list", "data": [entry_of(name)]}

        @router.post("/completions")
        async def completions(request: Request) -> Response:
            return await self._complete(request, pb.TEXT_ENDPOINT_COMPLETIONS)

        @router.post("/chat/completions")
        async def chat_completions(request: Request) -> Response:
            return await self._complete(request, pb.TEXT_ENDPOINT_CHAT_COMPLETIONS)

        return router

    async def complete_whole(self, tenant: str, name: str, body: bytes) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a completion's whole response, and the headers that name the weights it was sampled from."""
        ref = await self.models.resolve(tenant, name)
        message = pb.CompleteTextRequest(
            model=codec.model_ref_to_proto(ref), endpoint=pb.TEXT_ENDPOINT_COMPLETIONS, body=body
        )
        with _field_as_sent():
            async with self.services.stream(tenant, message, Part, model=ref, seconds=_SECONDS) as parts:
                first, headers = await _first(parts)
                return await decoded(len(first.data), json.loads, first.data), headers

    async def _complete(self, request: Request, endpoint: pb.TextEndpoint.ValueType) -> Response:
        content = await request.body()
        body, tenant = await decoded(len(content), read_object, content), tenant_of(request)
        name, streams = request.path_params.get("weights") or body.get("model"), body.get("stream")
        if name is None and endpoint == pb.TEXT_ENDPOINT_CHAT_COMPLETIONS:
            name, body = await self.without_model(tenant, body)
            content = (await decoded(len(content), json.dumps, body)).encode()
        if not isinstance(name, str | None):
            raise errors.InvalidArgument.must_be("a name", "model")
        if not name:
            raise errors.MissingField("is not set; GET /v1/models lists what there is", field="model")
        if streams not in (None, True, False):
            raise errors.InvalidArgument.must_be("true or false", "stream")
        ref = await self.models.resolve(tenant, name)
        message = pb.CompleteTextRequest(model=codec.model_ref_to_proto(ref), endpoint=endpoint, body=content)
        async with AsyncExitStack() as resources:
            # Wait for the first part before responding, so that a refusal sets the status.
            with _field_as_sent():
                parts, first, headers = await while_connected(request, self._begin(resources, tenant, message, ref))
            if not streams:
                return Response(first.data, headers=headers, media_type="application/json")
            return StreamedResponse(
                _events(first, parts, request.url.path), resources.pop_all(), headers=headers, media_type=EVENTS
            )

    async def _begin(
        self, resources: AsyncExitStack, tenant: str, message: pb.CompleteTextRequest, ref: ModelRef
    ) -> tuple[AsyncIterator[Part], Part, dict[str, str]]:
        """Return the parts of an answer after the first, the first, and its headers. The call ends with `resources`."""
        parts = await resources.enter_async_context(
            self.services.stream(tenant, message, Part, model=ref, seconds=_SECONDS)
        )
        return (parts, *await _first(parts))


async def _first(parts: AsyncIterator[Part]) -> tuple[Part, dict[str, str]]:
    """Return the first part of an answer, and the headers that name the weights it was sampled from."""
    first = await anext(parts, None)
    if first is None:
        raise errors.EngineUnavailable("the sampler ended the answer before its first part; try again")
    model = first.model
    weights = {
        "Run": model.run_id,
        "Version": str(model.version or ""),
        "Checkpoint": model.checkpoint,
        "Blake3": model.blake3,
    }
    headers = {f"X-Paceline-{name}": value for name, value in weights.items() if value}
    return first, {"X-Paceline-Model": model.base_model, **headers}


@contextmanager
def _field_as_sent() -> Iterator[None]:
    """Name the field `model` in errors about any part of it."""
    try:
        yield
    except errors.PacelineError as error:
        if error.field.startswith("model."):
            error.field = "model"
        raise


async def _events(first: Part, parts: AsyncIterator[Part], path: str) -> AsyncGenerator[bytes]:
    """Yield server-sent events; an error mid-stream becomes the last event."""
    try:
        yield b"data: " + first.data + b"\n\n"
        async for part in parts:
            yield b"data: " + part.data + b"\n\n"
    except errors.PacelineError as error:
        yield last_event(error, path)
        return
    yield b"data: [DONE]\n\n"
