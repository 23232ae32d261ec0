"""What the services say of themselves, merged into one description of the deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from gateway.admission import FairQueue
from gateway.proxy import Router, Upstream, gateway_error
from gateway.served_base import ServedBase
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from paceline import __version__, codec, errors
from paceline.codec.resources import timestamp_to_proto
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.requests.waiting_bytes import WaitingBytes
from paceline.rpc.identity import Identity
from paceline.rpc.process_info import process_info
from paceline.rpc.status import error_from_rpc
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import Quota
from paceline.types.v1 import model_pb2, quota_pb2

OfTrainer = TypeVar("OfTrainer", bound=Message)
OfSampler = TypeVar("OfSampler", bound=Message)
Reply = TypeVar("Reply", bound=Message)


class Deployment:
    """Asks the trainer and the samplers about themselves, for a caller."""

    def __init__(
        self, router: Router, tenants: Tenants, queue: FairQueue, waiting_bytes: WaitingBytes, settings: GatewaySettings
    ) -> None:
        self._tenants = tenants
        self._queue = queue
        self._router = router
        self._waiting_bytes = waiting_bytes
        self._settings = settings

    async def account(self, identity: Identity) -> pb.WhoAmIResponse:
        """Return a caller's account, with the quotas of its tenant. Raises what a service answers."""
        trainer, samplers = await self._ask(
            identity.tenant, "GetUsage", trainer_pb.GetUsageResponse, sampler_pb.GetUsageResponse
        )
        tenant, waiting = identity.tenant, self._waiting_bytes
        calls, _ = self._queue.by_tenant().get(tenant, (0, 0))
        own = [
            Quota("calls", calls, self._queue.limit_of(tenant)),
            Quota(waiting.quota.name, waiting.used(tenant), waiting.limit_of(tenant)),
        ]
        quotas = merge_quotas(
            trainer.quotas if trainer else (), [sampler.quotas for sampler in samplers if sampler is not None]
        )
        return pb.WhoAmIResponse(
            tenant=identity.tenant, key_name=identity.key_name, quotas=map(codec.quota_to_proto, [*own, *quotas])
        )

    async def capabilities(self, tenant: str) -> pb.GetCapabilitiesResponse:
        """Return what a tenant can train and sample, and the services. Raises UpstreamUnavailable if none answers."""
        trainer, samplers = await self._ask(
            tenant, "GetServerInfo", trainer_pb.GetServerInfoResponse, sampler_pb.GetServerInfoResponse
        )
        if trainer is None and not any(samplers):
            raise errors.UpstreamUnavailable("neither the trainer nor a sampler can be reached; try again")
        models: dict[str, pb.SupportedModel] = {}
        for info in trainer.models if trainer else ():
            _add(models, info).trainable = True
        base = ServedBase.of(trainer.models[0]) if trainer and trainer.models else self._router.base
        unused = []
        services = [
            pb.ServiceStatus(kind="gateway", reachable=True, service_version=__version__, process=process_info()),
            _service_of("trainer", trainer),
        ]
        for sampler in samplers:
            services.append(_service_of("sampler", sampler))
            if sampler is None:
                continue
            services[-1].sampler_id = sampler.sampler_id
            if why := _why_unused(sampler, base):
                services[-1].unused_because = why
                unused.append(f"{sampler.sampler_id}: {why}")
            else:
                _add(models, sampler.model).sampleable = True
        limits = [self._settings.max_message_bytes, trainer.max_message_bytes if trainer else 0]
        return pb.GetCapabilitiesResponse(
            models=models.values(),
            loss_fns=trainer.loss_fns if trainer else (),
            optimizers=trainer.optimizers if trainer else (),
            max_message_bytes=min(filter(None, limits)),
            service_version=__version__,
            unused_samplers=unused,
            services=services,
            time=timestamp_to_proto(datetime.now(UTC)),
        )

    async def _ask(
        self, tenant: str, method: str, trainer_reply: type[OfTrainer], sampler_reply: type[OfSampler]
    ) -> tuple[OfTrainer | None, list[OfSampler | None]]:
        """Call a method without arguments of the trainer and of all samplers, for a tenant.

        None stands for services that are unavailable, too slow, or too old to know the method. Samplers that get no
        calls are not asked for quotas.
        """
        asked = [one for one in self._router.samplers if method != "GetUsage" or one not in self._router.unused]
        metadata = self._tenants.metadata(tenant)
        timeout = self._settings.info_timeout_seconds

        async def ask(upstream: Upstream, service: str, reply: type[Reply]) -> Reply | None:
            try:
                call = upstream.unary(f"/{service}/{method}")(b"", metadata=metadata, timeout=timeout)
                return reply.FromString(await call)
            except grpc.aio.AioRpcError as failure:
                error = gateway_error(failure, upstream) or error_from_rpc(failure)
                if isinstance(error, errors.Unavailable | errors.TimedOut | errors.Unsupported):
                    return None
                raise error from failure

        of_trainer = ask(self._router.trainer, "paceline.trainer.v1.TrainerService", trainer_reply)
        of_samplers = [ask(sampler, "paceline.sampler.v1.SamplerService", sampler_reply) for sampler in asked]
        trainer, samplers = await asyncio.gather(of_trainer, asyncio.gather(*of_samplers))
        return trainer, samplers


def _service_of(
    kind: str, info: trainer_pb.GetServerInfoResponse | sampler_pb.GetServerInfoResponse | None
) -> pb.ServiceStatus:
    """Describe a service by its answer; None means that it gave none."""
    if info is None:
        return pb.ServiceStatus(kind=kind)
    process = info.process if info.HasField("process") else None
    return pb.ServiceStatus(kind=kind, reachable=True, service_version=info.service_version, process=process)


def _why_unused(sampler: sampler_pb.GetServerInfoResponse, base: ServedBase | None) -> str:
    """Say why a sampler answers no requests; empty if it does."""
    if base is None:
        return "the samplers serve different base models, and the trainer cannot be reached"
    return ServedBase.of(sampler.model).difference(base) or sampler.refusal


def _add(models: dict[str, pb.SupportedModel], info: model_pb2.ModelInfo) -> pb.SupportedModel:
    """Add a service's description of a model. Limits are the smallest among those of all services."""
    if info.name not in models:
        models[info.name] = pb.SupportedModel(model=info)
    model = models[info.name].model
    model.max_lora_rank = min(model.max_lora_rank, info.max_lora_rank)
    model.max_context_length = min(model.max_context_length, info.max_context_length)
    return models[info.name]


def merge_quotas(trainer: Sequence[quota_pb2.Quota], samplers: Sequence[Sequence[quota_pb2.Quota]]) -> list[Quota]:
    """Return the trainer's quotas and the sums of the samplers'. A sum has no limit if one of its quotas has none."""
    merged = [codec.quota_from_proto(quota) for quota in trainer]
    by_name: dict[str, list[Quota]] = {}
    for quota in (codec.quota_from_proto(quota) for sampler in samplers for quota in sampler):
        by_name.setdefault(quota.name, []).append(quota)
    for name, quotas in by_name.items():
        limits = [quota.limit for quota in quotas]
        merged.append(Quota(name, sum(quota.used for quota in quotas), sum(limits) if all(limits) else 0))
    return merged
