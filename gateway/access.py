"""Access per method. Unlisted methods are refused: a new method stays closed until it is listed here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

from paceline.rpc.server import REFLECTION_METHODS


class Access(Enum):
    """Who may call a method."""

    TENANT = auto()
    """Every caller that the gateway can identify."""
    NOBODY = auto()
    """Only services, which call each other directly, not through the gateway."""


_TRAINER = (
    "GetServerInfo",
    "GetUsage",
    "GetTokenizer",
    "RenderConversations",
    "CreateRun",
    "GetRun",
    "AttachRun",
    "ListRuns",
    "DeleteRun",
    "ForwardBackward",
    "OptimStep",
    "SaveCheckpoint",
    "LoadCheckpoint",
    "ListCheckpoints",
    "DeleteCheckpoint",
    "SetCheckpointTtl",
    "DownloadCheckpoint",
    "PublishWeights",
)
_SAMPLER = (
    "GetServerInfo",
    "GetUsage",
    "Sample",
    "SampleStream",
    "ComputeLogprobs",
    "CompleteText",
    "LoadVersion",
    "UnloadVersion",
    "ListVersions",
)

ACCESS: Mapping[str, Access] = MappingProxyType(
    {
        **{f"/paceline.trainer.v1.TrainerService/{name}": Access.TENANT for name in _TRAINER},
        **{f"/paceline.sampler.v1.SamplerService/{name}": Access.TENANT for name in _SAMPLER},
        "/paceline.sampler.v1.SamplerService/UpdateWeights": Access.NOBODY,
        "/paceline.weights.v1.WeightService/FetchVersion": Access.TENANT,
        "/paceline.weights.v1.WeightService/WatchVersions": Access.NOBODY,
        "/paceline.gateway.v1.GatewayService/GetCapabilities": Access.TENANT,
        "/paceline.gateway.v1.GatewayService/WhoAmI": Access.TENANT,
        **dict.fromkeys(REFLECTION_METHODS, Access.TENANT),
    }
)
"""Maps /package.Service/Method to its access."""
