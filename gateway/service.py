"""The gateway service, run by `paceline.rpc.server.serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry

from gateway.admission import AdmissionInterceptor, AnonymousAuthenticator, Authenticator, FairQueue, JwtVerifier
from gateway.deployment import Deployment
from gateway.http.services import Services
from gateway.keys import KeyRing
from gateway.metrics import add_call_metrics, add_http_metric, add_key_metrics, add_router_metrics
from gateway.proxy import SERVICES, Proxy, Router, Upstream
from gateway.servicer import GatewayServicer
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from paceline.extras import needing
from paceline.gateway.v1.gateway_service_pb2_grpc import add_GatewayServiceServicer_to_server
from paceline.requests.waiting_bytes import CALLS, WaitingBytes
from paceline.rpc.interceptors import AroundInterceptor
from paceline.rpc.server import Readiness

if TYPE_CHECKING:
    from gateway.http.edge import HttpEdge

_CONNECT_SECONDS = 2.0
"""How long startup waits to connect to the services; they may also come up later."""


class GatewayService:
    """Holds the connections to the services."""

    _router: Router
    _deployment: Deployment
    """Both are created by `start`, in the event loop that runs the calls."""
    name = "gateway"
    service_names: Sequence[str] = tuple(SERVICES)

    def __init__(self, settings: GatewaySettings, registry: CollectorRegistry | None = None) -> None:
        """Read the keys. Metrics go to `registry`. Raises InvalidArgument that names the invalid setting."""
        self._settings = settings
        self._registry = CollectorRegistry() if registry is None else registry
        self._authenticators = _authenticators(settings)
        self._tenants = Tenants(settings.tenants_file, settings.secret)
        limits = self._tenants.limits
        self._queue = FairQueue(
            settings.max_in_flight, settings.max_in_flight_per_tenant, settings.max_queued_per_tenant, limits
        )
        self._waiting_bytes = WaitingBytes(
            settings.max_bytes_in_flight, settings.max_bytes_in_flight_per_tenant, CALLS, limits
        )
        self._upstreams: list[Upstream] = []
        self._edge: HttpEdge | None = None

    def interceptors(self) -> Sequence[AroundInterceptor]:
        return (AdmissionInterceptor(self._authenticators, self._queue),)

    async def start(self, readiness: Readiness) -> None:
        settings = self._settings
        named = [("trainer", settings.trainer), *(("sampler", target) for target in settings.samplers)]
        self._upstreams = [Upstream(name, target, settings.upstream_tls, settings.secret) for name, target in named]
        self._router = Router(self._upstreams[0], self._upstreams[1:], settings.spill_in_flight)
        self._deployment = Deployment(self._router, self._tenants, self._queue, self._waiting_bytes, settings)
        add_router_metrics(self._router, self._registry)
        add_call_metrics(self._queue, self._registry)
        for keys in self._authenticators:
            if isinstance(keys, KeyRing):
                add_key_metrics(keys, self._registry)
        for upstream in self._upstreams:
            upstream.connect()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.gather(*(upstream.settled.wait() for upstream in self._upstreams))
        if settings.http_listen:
            with needing("http", "http_listen"):
                from gateway.http.edge import HttpEdge  # noqa: PLC0415 - without HTTP its libraries are not needed
            services = Services(self._router, self._tenants, self._queue, self._waiting_bytes)
            edge = self._edge = HttpEdge(
                settings, self._authenticators, services, self._deployment, self._waiting_bytes, self._registry
            )
            add_http_metric(lambda: edge.trouble, self._registry)
            await self._edge.start()

    def register(self, server: grpc.aio.Server) -> None:
        add_GatewayServiceServicer_to_server(GatewayServicer(self._deployment), server)
        server.add_generic_rpc_handlers([Proxy(self._router, self._tenants, self._waiting_bytes)])

    def drain(self) -> None:
        """Do nothing: queued calls proceed as the calls before them end."""

    async def stop(self) -> None:
        if self._edge is not None:
            await self._edge.stop()
        for upstream in self._upstreams:
            await upstream.close()


def _authenticators(settings: GatewaySettings) -> Sequence[Authenticator]:
    if settings.insecure:
        return (AnonymousAuthenticator(),)
    found: list[Authenticator] = []
    if settings.keys_file is not None:
        found.append(KeyRing(settings.keys_file))
    if settings.jwt_public_key_file is not None:
        claim, audience = settings.jwt_tenant_claim, settings.jwt_audience
        found.append(JwtVerifier(settings.jwt_public_key_file, settings.jwt_algorithm, claim, audience))
    return found
