"""Fine-tune language models on your own machines: train, publish, sample.

    client = paceline.ServiceClient()
    training = client.create_lora_training_client(rank=16)
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(paceline.AdamParams(learning_rate=1e-4))
    print(passed.result().metrics["loss:sum"], stepped.result().grad_norm)
    sampling = training.save_weights_and_get_sampling_client()
    print(sampling.sample(prompt, sampling_params=paceline.SamplingParams(max_tokens=64)).result().sequences)

All errors are classes of `paceline.errors`. Generated gRPC stubs, for calls without this client, are in
`paceline.<area>.v1`.
"""

import os

# In a forked process gRPC's own handlers would start its threads again, which crash the process if a call is in flight.
# A client refuses to be used there anyway. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from paceline import errors
from paceline.client import (
    Account,
    Acknowledgement,
    LogprobsResult,
    MetricsStream,
    PacelineFuture,
    PublishResult,
    RetryPolicy,
    SampleStream,
    SamplingClient,
    ServerCapabilities,
    ServiceClient,
    SupportedModel,
    Timeouts,
    TrainingClient,
)
from paceline.types import (
    AdafactorParams,
    Adam8bitParams,
    AdamCpuParams,
    AdamParams,
    AdapterGroup,
    ApolloMiniParams,
    ApolloParams,
    Checkpoint,
    CheckpointKind,
    Datum,
    ForwardBackwardOutput,
    FullParameters,
    LoraConfig,
    Metrics,
    MetricsRow,
    ModelCertificate,
    ModelInfo,
    ModelInput,
    ModelRef,
    OptimStepOutput,
    PackingMode,
    Quota,
    Rollout,
    RolloutRow,
    RowSource,
    Run,
    RunState,
    SampledSequence,
    SampleResult,
    SamplingParams,
    ServedModel,
    StopReason,
    StreamedTokens,
    TopkLogprobs,
    VersionSpan,
    WeightStorage,
)
from paceline.types.explained import explain

__version__ = "0.1.0"

__all__ = [
    "Account",
    "Acknowledgement",
    "AdafactorParams",
    "Adam8bitParams",
    "AdamCpuParams",
    "AdamParams",
    "AdapterGroup",
    "ApolloMiniParams",
    "ApolloParams",
    "Checkpoint",
    "CheckpointKind",
    "Datum",
    "ForwardBackwardOutput",
    "FullParameters",
    "LogprobsResult",
    "LoraConfig",
    "Metrics",
    "MetricsRow",
    "MetricsStream",
    "ModelCertificate",
    "ModelInfo",
    "ModelInput",
    "ModelRef",
    "OptimStepOutput",
    "PacelineFuture",
    "PackingMode",
    "PublishResult",
    "Quota",
    "RetryPolicy",
    "Rollout",
    "RolloutRow",
    "RowSource",
    "Run",
    "RunState",
    "SampleResult",
    "SampleStream",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServedModel",
    "ServerCapabilities",
    "ServiceClient",
    "StopReason",
    "StreamedTokens",
    "SupportedModel",
    "Timeouts",
    "TopkLogprobs",
    "TrainingClient",
    "VersionSpan",
    "WeightStorage",
    "__version__",
    "errors",
]

explain(globals()[name] for name in __all__)


def __dir__() -> list[str]:
    return sorted(__all__)
