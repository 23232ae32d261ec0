"""Calls to the services for HTTP callers, with the same queue, byte limits and routes as over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar
from uuid import uuid4

import grpc
from google.protobuf.message import Message
from structlog.contextvars import get_contextvars

from gateway.admission import FairQueue
from gateway.proxy import SERVICES, Router, Upstream
from paceline import errors
from paceline.rpc.identity import REQUEST_ID_KEY, ROUTE_KEY, peer_metadata
from paceline.rpc.status import DETAILS_KEY, error_from_rpc
from paceline.waiting_bytes import WaitingBytes

Reply = TypeVar("Reply", bound=Message)

_PATIENCE_SECONDS = 5.0
"""How long to wait for an unreachable service."""

_PATHS = {
    method.input_type.full_name: f"/{name}/{method.name}"
    for name, service in SERVICES.items()
    for method in service.methods
}
"""Maps the full name of a request message to its method."""


class Services:
    """The trainer and the samplers."""

    def __init__(self, router: Router, credential: str, queue: FairQueue, waiting_bytes: WaitingBytes) -> None:
        """Share the queue and the limits of the gateway's gRPC calls."""
        self._router = router
        self._credential = credential
        self._queue = queue
        self._waiting_bytes = waiting_bytes

    async def call(
        self, tenant: str, request: Message, reply: type[Reply], *, route: str = "", seconds: float = 30.0
    ) -> Reply:
        """Call the method of this request for a tenant. Raises the service's error.

        `route` is the version or checkpoint that a sampling call names: `str(ModelRef)`.
        """
        body = request.SerializeToString()
        async with self._place(tenant, len(body)):
            method, upstream, key = await self._choose(tenant, request, route)
            call = upstream.unary(method)(body, timeout=seconds, metadata=self._metadata(tenant, route))
            with self._router.tracked(call, upstream, key), _told(upstream):
                return reply.FromString(await call)

    @asynccontextmanager
    async def stream(
        self, tenant: str, request: Message, reply: type[Reply], *, route: str = "", seconds: float = 600.0
    ) -> AsyncIterator[AsyncIterator[Reply]]:
        """Call a method that answers with a stream, which ends with the block. See `call`."""
        body = request.SerializeToString()
        async with self._place(tenant, len(body)):
            method, upstream, key = await self._choose(tenant, request, route)
            call = upstream.response_stream(method)(body, timeout=seconds, metadata=self._metadata(tenant, route))

            async def replies() -> AsyncIterator[Reply]:
                with _told(upstream):
                    async for message in call:
                        yield reply.FromString(message)

            with self._router.tracked(call, upstream, key):
                yield replies()

    @asynccontextmanager
    async def _place(self, tenant: str, size: int) -> AsyncIterator[None]:
        await self._queue.acquire(tenant)
        try:
            with self._waiting_bytes.waiting(tenant, size):
                yield
        finally:
            self._queue.release(tenant)

    async def _choose(self, tenant: str, request: Message, route: str) -> tuple[str, Upstream, tuple[str, str] | None]:
        """Return the method, the service for it, and the route's key; wait for the service if it is unreachable.

        HTTP clients do not retry as Paceline's own client does.
        """
        key = (tenant, route) if route else None
        method = _PATHS[request.DESCRIPTOR.full_name]
        upstream = self._router.choose(method, key)
        await upstream.wait_until_ready(_PATIENCE_SECONDS)
        return method, upstream, key

    def _metadata(self, tenant: str, route: str) -> Sequence[tuple[str, str]]:
        request_id = get_contextvars().get("request_id") or uuid4().hex
        own = [*peer_metadata(self._credential, tenant), (REQUEST_ID_KEY, request_id)]
        return [*own, (ROUTE_KEY, route)] if route else own


@contextmanager
def _told(upstream: Upstream) -> Iterator[None]:
    """Convert a service's failure to a PacelineError."""
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        carries = any(name == DETAILS_KEY for name, _ in failure.trailing_metadata() or ())
        if failure.code() is grpc.StatusCode.UNAVAILABLE and not carries:
            message = f"the {upstream.name} cannot be reached; try again"
            raise errors.UpstreamUnavailable(message) from failure
        raise error_from_rpc(failure) from failure
