"""Merge the services' descriptions and quotas into one response."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import codec
from paceline.gateway.v1 import gateway_service_pb2 as pb
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types import Quota
from paceline.types.v1 import model_pb2, quota_pb2


def merge(
    trainer: trainer_pb.GetServerInfoResponse | None,
    samplers: Sequence[sampler_pb.GetServerInfoResponse],
    max_message_bytes: int,
) -> pb.GetCapabilitiesResponse:
    """Merge descriptions, leaving out services that are down. Limits are the smallest among those that answered."""
    models: dict[str, pb.SupportedModel] = {}
    for info in trainer.models if trainer else ():
        _add(models, info).trainable = True
    for sampler in samplers:
        _add(models, sampler.model).sampleable = True
    limits = [max_message_bytes] + ([trainer.max_message_bytes] if trainer and trainer.max_message_bytes else [])
    return pb.GetCapabilitiesResponse(
        models=models.values(),
        loss_fns=trainer.loss_fns if trainer else (),
        optimizers=trainer.optimizers if trainer else (),
        max_message_bytes=min(limits),
    )


def _add(models: dict[str, pb.SupportedModel], info: model_pb2.ModelInfo) -> pb.SupportedModel:
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
