"""Data types that users and engines exchange: dataclasses over numpy arrays.

Their wire format is in `paceline.types.v1` (generated).
"""

from paceline.types.commands import CommandState
from paceline.types.metrics import Metrics, MetricsRow, Rollout, RolloutRow, RowSource
from paceline.types.model import AdapterGroup, ModelCertificate, ModelInfo, ModelRef, PackingMode, ServedModel
from paceline.types.optimizers import (
    AdafactorParams,
    Adam8bitParams,
    AdamCpuParams,
    AdamParams,
    ApolloMiniParams,
    ApolloParams,
    OptimizerParams,
)
from paceline.types.resources import Checkpoint, CheckpointKind, Quota, Run, RunState
from paceline.types.sampling import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
    StreamedTokens,
    TopkLogprobs,
    VersionSpan,
)
from paceline.types.training import (
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardSpec,
    FullParameters,
    LoraConfig,
    ModelInput,
    OptimStepOutput,
    Reduction,
    RunParameters,
    WeightStorage,
)

__all__ = [
    "AdafactorParams",
    "Adam8bitParams",
    "AdamCpuParams",
    "AdamParams",
    "AdapterGroup",
    "ApolloMiniParams",
    "ApolloParams",
    "Checkpoint",
    "CheckpointKind",
    "CommandState",
    "Datum",
    "ForwardBackwardOutput",
    "ForwardBackwardSpec",
    "FullParameters",
    "LoraConfig",
    "Metrics",
    "MetricsRow",
    "ModelCertificate",
    "ModelInfo",
    "ModelInput",
    "ModelRef",
    "OptimStepOutput",
    "OptimizerParams",
    "PackingMode",
    "Quota",
    "Reduction",
    "Rollout",
    "RolloutRow",
    "RowSource",
    "Run",
    "RunParameters",
    "RunState",
    "SampleResult",
    "SampledSequence",
    "SamplingParams",
    "ServedModel",
    "StopReason",
    "StreamedTokens",
    "TopkLogprobs",
    "VersionSpan",
    "WeightStorage",
]
