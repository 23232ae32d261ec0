"""The RPCs that the gateway answers itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc
from google.protobuf.message import Message

from gateway.capabilities import merge, merge_quotas
from gateway.routes import Router
from paceline import codec, errors
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.gateway.v1.gateway_service_pb2_grpc import GatewayServiceServicer
from paceline.rpc.identity import current_identity, peer_metadata
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceStub
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from paceline.types import Quota
from paceline.waiting_bytes import WaitingBytes

if TYPE_CHECKING:  # these classes exist in the type stubs only
    from paceline.sampler.v1.sampler_service_pb2_grpc import SamplerServiceAsyncStub
    from paceline.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[bytes, bytes]


class GatewayServicer(GatewayServiceServicer):
    """paceline.gateway.v1.GatewayService."""

    def __init__(
        self,
        router: Router,
        waiting_bytes: WaitingBytes,
        credential: str,
        max_message_bytes: int,
        timeout: float,
        version: str,
    ) -> None:
        """`timeout` is how long each service may take to answer, in seconds."""
        self._router = router
        self._waiting_bytes = waiting_bytes
        self._credential = credential
        self._max_message_bytes = max_message_bytes
        self._timeout = timeout
        self._version = version

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.WhoAmIResponse:
        identity = current_identity()
        asked = self._ask(self._trainer().GetUsage, trainer_pb.GetUsageRequest())
        all_asked = [self._ask(stub.GetUsage, sampler_pb.GetUsageRequest()) for stub in self._samplers()]
        trainer, samplers = await asyncio.gather(asked, asyncio.gather(*all_asked))
        waiting = self._waiting_bytes
        own = Quota(waiting.quota.name, waiting.used(identity.tenant), waiting.tenant_limit)
        quotas = merge_quotas(trainer.quotas if trainer else (), [up.quotas for up in samplers if up])
        return pb.WhoAmIResponse(
            tenant=identity.tenant, key_name=identity.key_name, quotas=map(codec.quota_to_proto, [own, *quotas])
        )

    async def GetCapabilities(
        self,
        request: pb.GetCapabilitiesRequest,
        context: Context,
    ) -> pb.GetCapabilitiesResponse:
        asked = self._ask(self._trainer().GetServerInfo, trainer_pb.GetServerInfoRequest())
        all_asked = [self._ask(stub.GetServerInfo, sampler_pb.GetServerInfoRequest()) for stub in self._samplers()]
        trainer, samplers = await asyncio.gather(asked, asyncio.gather(*all_asked))
        up = [sampler for sampler in samplers if sampler is not None]
        if trainer is None and not up:
            raise errors.UpstreamUnavailable("neither the trainer nor a sampler can be reached; try again")
        merged = merge(trainer, up, self._max_message_bytes)
        merged.service_version = self._version
        return merged

    def _trainer(self) -> TrainerServiceAsyncStub:
        return TrainerServiceStub(self._router.trainer.channel)

    def _samplers(self) -> Sequence[SamplerServiceAsyncStub]:
        return [SamplerServiceStub(sampler.channel) for sampler in self._router.samplers]

    async def _ask(self, method: Callable[..., Awaitable[Reply]], request: Message) -> Reply | None:
        """Call a service for the caller. Return None if it is unavailable, too slow, or too old to know the method."""
        try:
            return await method(request, metadata=self._metadata(), timeout=self._timeout)
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            if isinstance(error, errors.Unavailable | errors.TimedOut | errors.Unsupported):
                return None
            raise error from failure

    def _metadata(self) -> Sequence[tuple[str, str]]:
        return peer_metadata(self._credential, current_identity().tenant)
