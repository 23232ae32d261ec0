"""What the gateway answers itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import grpc

from gateway.capabilities import merge
from gateway.routes import Router
from paceline import errors
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceServicer
from paceline.rpc.identity import current_identity, peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

T = TypeVar("T")
Context = grpc.aio.ServicerContext[bytes, bytes]


class GatewayServicer(GatewayServiceServicer):
    """paceline.gateway.v1.GatewayService."""

    def __init__(self, router: Router, credential: str, max_message_bytes: int, timeout: float, version: str) -> None:
        """`timeout` is how long each service may take to describe itself, in seconds."""
        self._router = router
        self._credential = credential
        self._max_message_bytes = max_message_bytes
        self._timeout = timeout
        self._version = version

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.WhoAmIResponse:
        identity = current_identity()
        return pb.WhoAmIResponse(tenant=identity.tenant, key_name=identity.key_name)

    async def GetCapabilities(
        self,
        request: pb.GetCapabilitiesRequest,
        context: Context,
    ) -> pb.GetCapabilitiesResponse:
        trainer, samplers = await asyncio.gather(self._ask_trainer(), asyncio.gather(*self._ask_samplers()))
        up = [sampler for sampler in samplers if sampler is not None]
        if trainer is None and not up:
            raise errors.UpstreamUnavailable("neither the trainer nor a sampler can be reached; try again")
        merged = merge(trainer, up, self._max_message_bytes)
        merged.service_version = self._version
        return merged

    def _ask_trainer(self) -> Awaitable[trainer_pb.GetServerInfoResponse | None]:
        stub = TrainerServiceStub(self._router.trainer.channel)
        request = trainer_pb.GetServerInfoRequest()
        return _if_up(stub.GetServerInfo(request, metadata=self._metadata(), timeout=self._timeout))

    def _ask_samplers(self) -> Sequence[Awaitable[sampler_pb.GetServerInfoResponse | None]]:
        request = sampler_pb.GetServerInfoRequest()
        return [
            _if_up(
                SamplerServiceStub(sampler.channel).GetServerInfo(
                    request, metadata=self._metadata(), timeout=self._timeout
                )
            )
            for sampler in self._router.samplers
        ]

    def _metadata(self) -> Sequence[tuple[str, str]]:
        return peer_metadata(self._credential, current_identity().tenant)


async def _if_up(call: Awaitable[T]) -> T | None:
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        error = error_from_rpc(failure)
        if isinstance(error, errors.Unavailable | errors.TimedOut):
            return None
        raise error from failure
