"""The RPCs that the gateway answers itself."""

from __future__ import annotations

import grpc

from gateway.deployment import Deployment
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceServicer
from paceline.rpc.identity import current_identity

Context = grpc.aio.ServicerContext[bytes, bytes]


class GatewayServicer(GatewayServiceServicer):
    """paceline.gateway.v1.GatewayService."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.WhoAmIResponse:
        return await self._deployment.account(current_identity())

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Context) -> pb.GetCapabilitiesResponse:
        return await self._deployment.capabilities(current_identity().tenant)
