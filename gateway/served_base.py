"""Which base model a service computes with, as it says itself, and whether a sampler's is the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.rpc.identity import peer_metadata
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb
from paceline.types.v1 import model_pb2

_TRAINER = "/paceline.trainer.v1.TrainerService/GetServerInfo"
_SAMPLER = "/paceline.sampler.v1.SamplerService/GetServerInfo"


@dataclass(frozen=True, slots=True)
class ServedBase:
    """A base model behind the gateway."""

    name: str
    sha256: str
    """Identity of its weights; empty if the service does not know it."""
    refusal: str = ""
    """Why the service answers no requests now; empty if it does."""

    @classmethod
    def of(cls, model: model_pb2.ModelInfo, refusal: str = "") -> ServedBase:
        """Return the base model that a service describes."""
        return cls(model.name, model.weights_sha256, refusal)

    def difference(self, other: ServedBase) -> str:
        """Say how a sampler's base model, this one, differs from the `other`; empty if it does not."""
        if self.name != other.name:
            return f"it serves {self.name}, not {other.name}"
        if self.sha256 and other.sha256 and self.sha256 != other.sha256:
            return f"its weights of {self.name} are others: SHA-256 {self.sha256}, not {other.sha256}"
        return ""


async def ask_base(channel: grpc.aio.Channel, name: str, credential: str, seconds: float) -> ServedBase | None:
    """Ask the trainer or a sampler for its base model; None if it has none. Raises AioRpcError."""
    metadata, method = peer_metadata(credential), _TRAINER if name == "trainer" else _SAMPLER
    call: Any = channel.unary_unary(method)
    reply = await call(b"", metadata=metadata, timeout=seconds)
    if name == "trainer":
        models = trainer_pb.GetServerInfoResponse.FromString(reply).models
        return ServedBase.of(models[0]) if models else None
    info = sampler_pb.GetServerInfoResponse.FromString(reply)
    return ServedBase.of(info.model, info.refusal)


def common_base(bases: Sequence[ServedBase]) -> ServedBase | None:
    """Return the base model that all have; None if they differ, or there is none."""
    same = bases and not any(base.difference(bases[0]) for base in bases)
    return bases[0] if same else None
