"""Forward calls as bytes. Only metadata is read, never a message, so a new method needs no change here.

    caller ──► server ──► interceptors ──► Proxy ──► Router ──► Upstream ──► service

Forwarded unchanged: messages, deadline, cancellation (both ways), metadata, status code, details, trailers.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from structlog.contextvars import get_contextvars

from gateway.routes import RouteKey, Router
from gateway.upstream import Upstream
from paceline import errors
from paceline.gateway.v1 import gateway_service_pb2
from paceline.rpc.identity import API_KEY_KEY, REQUEST_ID_KEY, ROUTE_KEY, current_identity, peer_metadata
from paceline.rpc.readers import current_reader
from paceline.rpc.status import DETAILS_KEY
from paceline.sampler.v1 import sampler_service_pb2
from paceline.trainer.v1 import trainer_service_pb2
from paceline.waiting_bytes import WaitingBytes
from paceline.weights.v1 import weight_service_pb2

SERVICES = {
    service.full_name: service
    for file in (gateway_service_pb2, trainer_service_pb2, sampler_service_pb2, weight_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
"""Descriptors of all reachable services, by full name."""

_METHODS = {f"/{name}/{method.name}": method for name, service in SERVICES.items() for method in service.methods}

_OWN = (API_KEY_KEY, REQUEST_ID_KEY, "user-agent", "host", "te", "content-type")
_OWN_PREFIXES = ("x-paceline-", "grpc-", ":")

Context = grpc.aio.ServicerContext[bytes, bytes]
Metadata = Sequence[tuple[str, str | bytes]]


class Proxy(grpc.GenericRpcHandler):
    """Handles every method of Paceline's services that has no other handler."""

    def __init__(self, router: Router, credential: str, waiting_bytes: WaitingBytes) -> None:
        """`credential` authenticates the gateway to the services; empty if they run insecurely."""
        self._waiting_bytes = waiting_bytes
        self._router = router
        self._credential = credential

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = handler_call_details.method
        if not method.startswith("/paceline."):
            return None
        known = _METHODS.get(method)
        # On the wire every method is a bidirectional stream, so a method of unknown kind can be forwarded as one. The
        # other kinds are cheaper and keep the status of an early failure: in a stream, the write that the failure
        # interrupts would replace it.
        if known is None or known.client_streaming:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, method))
        if known.server_streaming:
            return grpc.unary_stream_rpc_method_handler(partial(self._response_stream, method))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, method))

    async def _unary(self, method: str, request: bytes, context: Context) -> bytes:
        metadata, key = self._metadata(context)
        upstream = self._router.choose(method, key)
        with self._waiting_bytes.waiting(current_identity().tenant, len(request)):
            call = upstream.unary(method)(request, timeout=context.time_remaining(), metadata=metadata)
            async with self._following(call, upstream, key, context):
                return await call

    async def _response_stream(self, method: str, request: bytes, context: Context) -> None:
        metadata, key = self._metadata(context)
        upstream = self._router.choose(method, key)
        with self._waiting_bytes.waiting(current_identity().tenant, len(request)):
            call = upstream.response_stream(method)(request, timeout=context.time_remaining(), metadata=metadata)
            async with self._following(call, upstream, key, context):
                await _pass_on(call)

    async def _stream(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        metadata, key = self._metadata(context)
        upstream = self._router.choose(method, key)
        call = upstream.stream(method)(requests, timeout=context.time_remaining(), metadata=metadata)
        async with self._following(call, upstream, key, context):
            await _pass_on(call)

    @asynccontextmanager
    async def _following(
        self, call: grpc.aio.Call, upstream: Upstream, key: RouteKey | None, context: Context
    ) -> AsyncIterator[None]:
        try:
            with self._router.following(call, upstream, key):
                yield
                if trailing := tuple(await call.trailing_metadata()):
                    context.set_trailing_metadata(trailing)
        except grpc.aio.AioRpcError as failure:
            await _pass_failure(failure, upstream, context)

    def _metadata(self, context: Context) -> tuple[Metadata, RouteKey | None]:
        tenant = current_identity().tenant
        given: Metadata = tuple(context.invocation_metadata() or ())
        route = next((value for name, value in given if name == ROUTE_KEY and isinstance(value, str)), None)
        kept = [pair for pair in given if pair[0] not in _OWN and not pair[0].startswith(_OWN_PREFIXES)]
        own: list[tuple[str, str | bytes]] = [*peer_metadata(self._credential, tenant)]
        if request_id := get_contextvars().get("request_id"):
            own.append((REQUEST_ID_KEY, request_id))
        if route is None:
            return [*kept, *own], None
        return [*kept, *own, (ROUTE_KEY, route)], (tenant, route)


async def _pass_on(responses: AsyncIterable[bytes]) -> None:
    write = current_reader().write
    async for response in responses:
        await write(response)


async def _pass_failure(failure: grpc.aio.AioRpcError, upstream: Upstream, context: Context) -> None:
    trailing: Any = tuple(failure.trailing_metadata() or ())
    if failure.code() is grpc.StatusCode.UNAVAILABLE and not any(name == DETAILS_KEY for name, _ in trailing):
        raise errors.UpstreamUnavailable(f"the {upstream.name} cannot be reached; try again") from failure
    await context.abort(failure.code(), failure.details() or "", trailing)
