"""The gateway as `paceline.rpc.server.serve` runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from gateway.authenticators import Authenticator, Everybody, JwtVerifier
from gateway.interceptors import AuthInterceptor, LimitsInterceptor
from gateway.interceptors.limits import FairQueue
from gateway.keys import KeyRing
from gateway.proxy import SERVICES, Proxy
from gateway.routes import Router
from gateway.servicer import GatewayServicer
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream
from paceline import __version__
from paceline.gateway.v1.gateway_service_pb2_grpc import add_GatewayServiceServicer_to_server
from paceline.rpc.interceptors import AroundInterceptor
from paceline.rpc.server import Readiness
from paceline.waiting_bytes import CALLS, WaitingBytes

_CONNECT_SECONDS = 2.0
"""How long the start waits for services to answer; they may also come later."""


class GatewayService:
    """Holds the connections to the services."""

    name = "gateway"
    service_names: Sequence[str] = tuple(SERVICES)

    def __init__(self, settings: GatewaySettings) -> None:
        """Read the keys. Raises InvalidArgument naming the setting that is wrong."""
        self._settings = settings
        self._authenticators = _authenticators(settings)
        self._upstreams: list[Upstream] = []

    def interceptors(self) -> Sequence[AroundInterceptor]:
        settings = self._settings
        queue = FairQueue(settings.max_in_flight, settings.max_in_flight_per_tenant, settings.max_queued_per_tenant)
        return (AuthInterceptor(self._authenticators), LimitsInterceptor(queue))

    async def start(self, readiness: Readiness) -> None:
        settings = self._settings
        named = [("trainer", settings.trainer), *(("sampler", target) for target in settings.samplers)]
        self._upstreams = [Upstream(name, target, settings.upstream_tls) for name, target in named]
        for upstream in self._upstreams:
            upstream.connect()
        settled = [asyncio.ensure_future(upstream.settled.wait()) for upstream in self._upstreams]
        _, late = await asyncio.wait(settled, timeout=_CONNECT_SECONDS)
        for waiting in late:
            waiting.cancel()

    def register(self, server: grpc.aio.Server) -> None:
        settings = self._settings
        router = Router(self._upstreams[0], self._upstreams[1:], settings.spill_in_flight)
        waiting = WaitingBytes(settings.max_bytes_in_flight, settings.max_bytes_in_flight_per_tenant, CALLS)
        servicer = GatewayServicer(
            router, waiting, settings.secret, settings.max_message_bytes, settings.info_timeout_seconds, __version__
        )
        add_GatewayServiceServicer_to_server(servicer, server)
        server.add_generic_rpc_handlers([Proxy(router, settings.secret, waiting)])

    def drain(self) -> None:
        """Leave the calls that wait: they end as those before them do."""

    async def stop(self) -> None:
        for upstream in self._upstreams:
            await upstream.close()


def _authenticators(settings: GatewaySettings) -> Sequence[Authenticator]:
    if settings.insecure:
        return (Everybody(),)
    found: list[Authenticator] = []
    if settings.keys_file is not None:
        found.append(KeyRing(settings.keys_file))
    if settings.jwt_public_key_file is not None:
        claim, audience = settings.jwt_tenant_claim, settings.jwt_audience
        found.append(JwtVerifier(settings.jwt_public_key_file, settings.jwt_algorithm, claim, audience))
    return found
